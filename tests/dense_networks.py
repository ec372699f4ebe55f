"""Networks beyond classifiers with the structure of real ones, small; they output a map, a tuple, a dict or a list.

As a module it is where their bundles find the functions that build them.
"""

from __future__ import annotations

import torch
from networks import Network
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import mobilenet_v3_small
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.segmentation.deeplabv3 import ASPP, DeepLabV3
from torchvision.models.segmentation.fcn import FCN, FCNHead


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """Ronneberger et al. (2015): convs, pooling, transposed convs, concatenations; a map of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([double_conv(3, 8), double_conv(8, 12), double_conv(12, 16)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 12, 2, stride=2), nn.ConvTranspose2d(12, 8, 2, stride=2)])
        self.join = nn.ModuleList([double_conv(24, 12), double_conv(16, 8)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down[0](x)
        skipped = []
        for step in self.down[1:]:
            skipped.append(x)
            x = step(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], dim=1))
        return self.out(x)


class Volume(nn.Module):
    """A stage of V-Net: convs whose result is added to what came in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fit = nn.Conv3d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.convs = nn.Sequential(
            nn.Conv3d(inputs, outputs, 5, padding=2), nn.BatchNorm3d(outputs), nn.PReLU(outputs),
            nn.Conv3d(outputs, outputs, 5, padding=2), nn.BatchNorm3d(outputs),
        )  # fmt: skip
        self.relu = nn.PReLU(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.convs(x) + self.fit(x))


class VNet(nn.Module):
    """Milletari et al. (2016): volumes, strided convs, residuals inside and across; a volume of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.deep = Volume(1, 4), nn.Conv3d(4, 8, 2, stride=2), Volume(8, 8)
        self.up, self.last = nn.ConvTranspose3d(8, 4, 2, stride=2), Volume(8, 4)
        self.out = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = F.relu(self.deep(F.relu(self.down(fine))))
        return self.out(self.last(torch.cat([fine, F.relu(self.up(coarse))], dim=1)))


class Signals(nn.Module):
    """Dilated residual convs on signals; scores for each signal, and its envelope at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(2, 12, 7, padding=3), nn.BatchNorm1d(12), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(12, 8, 3, padding=d, dilation=d), nn.GELU(), nn.Conv1d(8, 12, 1)) for d in (1, 2, 4)
        )
        self.scores, self.envelope = nn.Linear(12, 4), nn.Conv1d(12, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.scores(x.mean(2)), self.envelope(x)


def _maps(*names: str) -> IntermediateLayerGetter:
    features = mobilenet_v3_small(width_mult=0.5).features
    return IntermediateLayerGetter(features, {place: name for name, place in zip(names, ("5", "3"), strict=False)})


def fcn() -> nn.Module:
    return FCN(_maps("out", "aux"), FCNHead(24, 3), FCNHead(16, 3))


def deeplab() -> nn.Module:
    head = nn.Sequential(ASPP(24, [2, 4], 16), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
    return DeepLabV3(_maps("out"), head)


def detector() -> nn.Module:
    """Faster R-CNN with a feature pyramid; a list with a dict of boxes, labels and scores for each image."""
    features = mobilenet_v3_small(width_mult=0.5).features[:6]
    backbone = BackboneWithFPN(features, {"3": "0", "5": "1"}, [16, 24], 16)
    return FasterRCNN(
        backbone,
        min_size=64,
        max_size=64,
        rpn_anchor_generator=AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3),
        rpn_pre_nms_top_n_test=20,
        rpn_post_nms_top_n_test=8,
        box_head=TwoMLPHead(16 * 7 * 7, 12),
        box_predictor=FastRCNNPredictor(12, 3),
        box_score_thresh=0.0,
        box_detections_per_img=8,
    )


class RawDetector(nn.Module):
    """What the detector computes before it chooses boxes."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> dict[str, list[Tensor]]:
        maps = list(self.detector.backbone(images).values())
        objectness, deltas = self.detector.rpn.head(maps)
        return {"maps": maps, "objectness": objectness, "deltas": deltas}


def unet() -> nn.Module:
    return UNet()


def vnet() -> nn.Module:
    return VNet()


def signals() -> nn.Module:
    return Signals()


DENSE = {
    "unet": Network(unet, (2, 3, 16, 16)),
    "vnet": Network(vnet, (2, 1, 8, 8, 8)),
    "signals": Network(signals, (2, 2, 32)),
    "fcn": Network(fcn, (2, 3, 64, 64)),
    "deeplab": Network(deeplab, (2, 3, 64, 64)),
    "detector": Network(detector, (2, 3, 64, 64)),
}
