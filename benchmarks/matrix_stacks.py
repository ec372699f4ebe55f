"""The second table of the matrix: 66 networks of other libraries, which nothing here was built for.

Each with random weights and a small config, on small inputs. The libraries are installed when one wants the table, and
are in no extra: `pip install monai segmentation-models-pytorch ultralytics diffusers transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from matrix_networks import RawDetector
from torch import Tensor, nn

Built = tuple[nn.Module, Any]
"""A network and what it is given: a batch of two, or a tuple or dict of such."""


def _images(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def _of(module: str, name: str, *args: Any, **given: Any) -> nn.Module:
    network: nn.Module = getattr(import_module(module), name)(*args, **given)
    return network


def _timm(name: str, side: int = 64, **given: Any) -> Built:
    return _of("timm", "create_model", name, pretrained=False, **given), _images(3, side, side)


def _smp(name: str, encoder: str = "resnet18", side: int = 64) -> Built:
    model = _of("segmentation_models_pytorch", name, encoder, encoder_weights=None, classes=3)
    return model, _images(3, side, side)


def _monai(name: str, *shape: int, **given: Any) -> Built:
    return _of("monai.networks.nets", name, **given), _images(*shape)


def _yolo(config: str, side: int = 64) -> Built:
    network: nn.Module = import_module("ultralytics").YOLO(config).model
    return network, _images(3, side, side)


def _transformers(name: str, config: str, *shape: int, **given: Any) -> Built:
    made = getattr(import_module("transformers"), config)(**given)
    return _of("transformers", name, made), _images(*(shape or (3, 64, 64)))


def _video(name: str, *shape: int, **given: Any) -> Built:
    return _of("torchvision.models.video", name, **given), _images(*shape)


def _detector(name: str, side: int = 96) -> Built:
    given = {} if name.startswith("ssd") else {"min_size": side, "max_size": side}
    found = _of("torchvision.models.detection", name, weights=None, weights_backbone=None, **given)
    return RawDetector(found), _images(3, 320 if name.startswith("ssd") else side, side if given else 320)


def _raft() -> Built:
    network = _of("torchvision.models.optical_flow", "raft_small")
    network.forward = partial(network.forward, num_flow_updates=2)
    return network, (_images(3, 128, 128), _images(3, 128, 128).flip(3))


def _diffusers(name: str, inputs: Mapping[str, Tensor] | Tensor, **given: Any) -> Built:
    return _of("diffusers", name, **given), inputs


_STEP = torch.tensor([3, 7])
_NOISY = {"sample": _images(3, 16, 16), "timestep": _STEP}
_TEXT = _NOISY | {"encoder_hidden_states": _images(5, 16)}
_WIDTHS = (8, 16)
_TWO = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_UNET = {"block_out_channels": _WIDTHS, "norm_num_groups": 4, "layers_per_block": 1}
_CODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": _WIDTHS,
    "norm_num_groups": 4,
}
_VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_PYRAMID = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_labels": 3}
_SMALL_RESNET = {"embedding_size": 8, "hidden_sizes": [12, 16], "depths": [1, 1], "layer_type": "basic"}
_SPEECH = {
    **_VIT,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}
_SPECTRA = {"num_mel_bins": 32, "max_length": 64, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}
_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}


def _detr() -> Built:
    transformers = import_module("transformers")
    backbone = transformers.ResNetConfig(**_SMALL_RESNET, out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, d_model=32, num_queries=5,
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
        decoder_attention_heads=2, num_labels=3,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config), _images(3, 64, 64)


def _upernet() -> Built:
    transformers = import_module("transformers")
    backbone = transformers.ConvNextConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, out_features=[f"stage{number}" for number in range(1, 5)]
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, num_labels=3, auxiliary_in_channels=16, auxiliary_channels=8
    )
    return transformers.UperNetForSemanticSegmentation(config), _images(3, 64, 64)


NETWORKS: Mapping[str, Callable[[], Built]] = {
    "timm/resnet18 features": lambda: _timm("resnet18", features_only=True),
    "timm/convnext_atto": lambda: _timm("convnext_atto"),
    "timm/efficientnet_b0 features": lambda: _timm("efficientnet_b0", features_only=True),
    "timm/mobilevit_xxs": lambda: _timm("mobilevit_xxs"),
    "timm/swin_tiny": lambda: _timm("swin_tiny_patch4_window7_224", img_size=64, window_size=2),
    "timm/twins_svt_small": lambda: _timm("twins_svt_small"),
    "timm/coat_tiny": lambda: _timm("coat_tiny", img_size=64),
    "timm/hrnet_w18_small features": lambda: _timm("hrnet_w18_small", features_only=True),
    "smp/Unet": lambda: _smp("Unet"),
    "smp/UnetPlusPlus": lambda: _smp("UnetPlusPlus"),
    "smp/MAnet": lambda: _smp("MAnet"),
    "smp/Linknet": lambda: _smp("Linknet"),
    "smp/FPN": lambda: _smp("FPN"),
    "smp/PSPNet": lambda: _smp("PSPNet"),
    "smp/PAN": lambda: _smp("PAN", side=128),
    "smp/DeepLabV3": lambda: _smp("DeepLabV3"),
    "smp/DeepLabV3Plus": lambda: _smp("DeepLabV3Plus"),
    "smp/UPerNet": lambda: _smp("UPerNet"),
    "smp/Segformer": lambda: _smp("Segformer", "mit_b0"),
    "monai/VNet": lambda: _monai("VNet", 1, 16, 16, 16, in_channels=1, out_channels=2),
    "monai/UNet": lambda: _monai(
        "UNet", 1, 16, 16, 16, **_VOLUME, channels=(8, 16, 32), strides=(2, 2), num_res_units=2
    ),
    "monai/BasicUNet": lambda: _monai("BasicUNet", 1, 32, 32, 32, **_VOLUME, features=(8, 8, 16, 32, 32, 8)),
    "monai/AttentionUnet": lambda: _monai("AttentionUnet", 1, 16, 16, 16, **_VOLUME, channels=(8, 16), strides=(2, 2)),
    "monai/DynUNet": lambda: _monai(
        "DynUNet", 1, 16, 16, 16, **_VOLUME, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2],
        filters=(8, 16, 32), deep_supervision=True, deep_supr_num=1,
    ),
    "monai/SegResNet": lambda: _monai("SegResNet", 1, 16, 16, 16, **_VOLUME, init_filters=8),
    "monai/HighResNet": lambda: _monai("HighResNet", 1, 16, 16, 16, **_VOLUME),
    "monai/MedNeXt": lambda: _monai(
        "MedNeXt", 1, 32, 32, 32, **_VOLUME, init_filters=8, blocks_down=(1,) * 4, blocks_up=(1,) * 4,
    ),
    "monai/UNETR": lambda: _monai(
        "UNETR", 1, 16, 16, 16, in_channels=1, out_channels=2, img_size=(16, 16, 16), feature_size=8, hidden_size=32,
        mlp_dim=64, num_heads=4,
    ),
    "monai/SwinUNETR": lambda: _monai(
        "SwinUNETR", 1, 64, 64, in_channels=1, out_channels=2, feature_size=12, spatial_dims=2
    ),
    "monai/DenseNet121": lambda: _monai("DenseNet121", 1, 32, 32, 32, **_VOLUME),
    "ultralytics/yolo11n": lambda: _yolo("yolo11n.yaml"),
    "ultralytics/yolo11n-seg": lambda: _yolo("yolo11n-seg.yaml"),
    "ultralytics/yolo11n-pose": lambda: _yolo("yolo11n-pose.yaml"),
    "ultralytics/yolo11n-cls": lambda: _yolo("yolo11n-cls.yaml"),
    "ultralytics/yolov8n": lambda: _yolo("yolov8n.yaml"),
    "ultralytics/yolov5n": lambda: _yolo("yolov5n.yaml"),
    "ultralytics/yolov10n": lambda: _yolo("yolov10n.yaml"),
    "ultralytics/yolo12n": lambda: _yolo("yolo12n.yaml"),
    "transformers/ResNet": lambda: _transformers("ResNetForImageClassification", "ResNetConfig", **_SMALL_RESNET),
    "transformers/ConvNext": lambda: _transformers(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
    ),
    "transformers/MobileNetV2": lambda: _transformers(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.35
    ),
    "transformers/MobileViT": lambda: _transformers(
        "MobileViTForImageClassification", "MobileViTConfig", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8] * 7
    ),
    "transformers/RegNet": lambda: _transformers(
        "RegNetForImageClassification", "RegNetConfig", embedding_size=8, hidden_sizes=[16, 16, 32, 32],
        depths=[1] * 4, groups_width=8,
    ),
    "transformers/SegFormer": lambda: _transformers(
        "SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[8, 16, 16, 32], depths=[1] * 4,
        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
    ),
    "transformers/DETR": _detr,
    "transformers/UperNet": _upernet,
    "transformers/ViT": lambda: _transformers(
        "ViTForImageClassification", "ViTConfig", **_VIT, image_size=64, patch_size=16
    ),
    "transformers/Swin": lambda: _transformers(
        "SwinForImageClassification", "SwinConfig", image_size=64, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
        window_size=4,
    ),
    "transformers/PoolFormer": lambda: _transformers(
        "PoolFormerForImageClassification", "PoolFormerConfig", hidden_sizes=[8, 16, 16, 32], depths=[1] * 4
    ),
    "torchvision/r3d_18": lambda: _video("r3d_18", 3, 8, 32, 32),
    "torchvision/mc3_18": lambda: _video("mc3_18", 3, 8, 32, 32),
    "torchvision/r2plus1d_18": lambda: _video("r2plus1d_18", 3, 8, 32, 32),
    "torchvision/s3d": lambda: _video("s3d", 3, 14, 224, 224),
    "torchvision/swin3d_t": lambda: _video("swin3d_t", 3, 8, 32, 32),
    "torchvision/fasterrcnn_mobilenet": lambda: _detector("fasterrcnn_mobilenet_v3_large_320_fpn"),
    "torchvision/ssdlite320": lambda: _detector("ssdlite320_mobilenet_v3_large"),
    "torchvision/raft_small": _raft,
    "audio/AST": lambda: _transformers("ASTForAudioClassification", "ASTConfig", 64, 32, **_VIT, **_SPECTRA),
    "audio/Wav2Vec2": lambda: _transformers(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", 1600, **_SPEECH
    ),
    "audio/Hubert": lambda: _transformers("HubertForSequenceClassification", "HubertConfig", 1600, **_SPEECH),
    "audio/EnCodec encoder": lambda: (
        _transformers("EncodecModel", "EncodecConfig", num_filters=4, hidden_size=16, codebook_dim=16)[0]
        .get_submodule("encoder"),
        _images(1, 1600),
    ),
    "diffusion/UNet2D": lambda: _diffusers("UNet2DModel", _NOISY, sample_size=16, **_UNET, **_TWO),
    "diffusion/UNet2DCondition": lambda: _diffusers("UNet2DConditionModel", {**_TEXT, "sample": _images(4, 16, 16)},
        sample_size=16, **_UNET, **_CROSS),
    "diffusion/AutoencoderKL": lambda: _diffusers("AutoencoderKL", _images(3, 32, 32), **_CODER),
    "diffusion/VQModel": lambda: _diffusers("VQModel", _images(3, 32, 32), **_CODER),
    "diffusion/MONAI DiffusionModelUNet": lambda: (
        _monai(
            "DiffusionModelUNet", spatial_dims=2, in_channels=1, out_channels=1, channels=_WIDTHS,
            attention_levels=(False, True), norm_num_groups=4, num_res_blocks=1, num_head_channels=8,
        )[0],
        {"x": _images(1, 16, 16), "timesteps": _STEP},
    ),
}  # fmt: skip
