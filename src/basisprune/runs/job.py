"""A run that is ready to start: the network, the images and all settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from pydantic import JsonValue
from torch import nn

from basisprune.data import Splits, load_data
from basisprune.data.load import Source
from basisprune.deploy.bundle import holds_bundle, load_bundle
from basisprune.errors import ConfigError, ModelError
from basisprune.runs.options import RunConfig
from basisprune.runs.output import IN_PYTHON
from basisprune.transfer.model import TransferModel, spec_of, transfer_model

ModelSource = str | os.PathLike[str] | nn.Module


@dataclass(frozen=True)
class Job:
    """The input of a run; `model` and `data` are their names in the settings."""

    network: nn.Module
    splits: Splits
    config: RunConfig
    model: str
    data: str

    def noted(self) -> dict[str, JsonValue]:
        """All settings as JSON values, as in config.yaml."""
        return {"model": self.model, "data": self.data, **self.config.noted()}


def prepare_job(model: ModelSource, data: Source, config: RunConfig) -> Job:
    """The network to start from, with its classes, and the images at its input size.

    `model` is a transfer model, the folder of a saved one, or anything that `transfer_model` takes; `data` is
    anything that `load_data` takes. Raises ConfigError for a size other than that of an already trained model.
    """
    torch.manual_seed(config.seed)
    names = _called(model), _called(data)
    if isinstance(model, os.PathLike):
        model = str(model)
    if isinstance(model, str) and _is_folder_of_a_model(Path(model)):
        model = load_bundle(model, trust_remote_code=config.trust_code).model
        if not isinstance(model, TransferModel):
            raise ModelError(
                "this bundle is folded and cannot be trained; start from a bundle written by `basisprune train`"
            )
    if isinstance(model, nn.Module) and hasattr(model, "input_spec"):
        network, splits = model, _load_for(model, data, config)
    else:
        network, splits = _new_network(model, data, config)
    return Job(network, splits, config, *names)


def _is_folder_of_a_model(path: Path) -> bool:
    """Whether the path, and not a timm model of that name, is meant; an output folder may be named like the model."""
    return holds_bundle(path) or (path.is_dir() and not timm.is_model(path.name))


def _load_for(model: nn.Module, data: Source, config: RunConfig) -> Splits:
    """The images for a model with an input spec."""
    spec, size = spec_of(model), config.images.size
    if size is not None and (size, size) != spec.size:
        height, width = spec.size
        raise ConfigError(f"size: {size} given, but the model takes {height}x{width} images; omit it")
    return load_images(data, spec.size, config)


def _new_network(model: str | nn.Module, data: Source, config: RunConfig) -> tuple[TransferModel, Splits]:
    side = config.images.size
    size = None if side is None else (side, side)
    splits = load_images(data, size, config)
    by_name = isinstance(model, str) and ":" not in model
    network = transfer_model(model, splits.num_classes, pretrained=config.pretrained and by_name, input_size=side)
    wanted = network.input_spec.size
    if isinstance(data, str | os.PathLike) and size is None and wanted != (224, 224):
        splits = load_images(data, wanted, config)  # image files are resized as they are read
    return network, splits


def load_images(data: Source, size: tuple[int, int] | None, config: RunConfig) -> Splits:
    """The images at that size, split according to the settings."""
    images = config.images
    return load_data(
        data,
        size=size,
        val_fraction=images.val_fraction,
        test_fraction=images.test_fraction,
        limit=images.limit,
        seed=config.seed,
    )


def _called(given: object) -> str:
    """The name of a model or data in the settings."""
    return str(given) if isinstance(given, str | os.PathLike) else f"a {type(given).__name__}{IN_PYTHON}"
