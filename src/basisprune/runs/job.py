"""A run that is ready to start: the network, the images and all settings."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import timm
import torch
from pydantic import JsonValue
from torch import nn

from basisprune.budget import Budget
from basisprune.data import Splits, load_data
from basisprune.data.load import Source
from basisprune.data.looks import random_numbers_kept
from basisprune.data.manifest import IMAGES, Manifest, read_manifest
from basisprune.data.opening import reread, white_of
from basisprune.data.reading import Reading
from basisprune.deploy.bundle import holds_bundle, load_bundle
from basisprune.errors import ConfigError, ModelError
from basisprune.files import user_path
from basisprune.listener import Listener
from basisprune.runs.options import RunConfig
from basisprune.runs.output import CONFIG, IN_PYTHON
from basisprune.runs.validating import read_settings
from basisprune.transfer.model import TransferModel, spec_of, transfer_model

ModelSource = str | os.PathLike[str] | nn.Module
_Read = Callable[[tuple[int, int] | None], Splits]


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


def prepare_job(
    model: ModelSource,
    data: Source,
    config: RunConfig,
    *,
    output: Path | None = None,
    listener: Listener | None = None,
) -> Job:
    """The network to start from, with its classes, and the images at its input size, all of which were opened.

    `model` is a transfer model, the folder of a saved one, or anything that `transfer_model` takes; `data` is
    anything that `load_data` takes. A run in the folder `output` that has chosen its images before goes on with
    exactly these. Raises ConfigError for a size other than that of an already trained model, and DataError for images
    that cannot be used, or are not those of the run.
    """
    torch.manual_seed(config.seed)
    names = _called(model), _called(data)
    folder = None if output is None else user_path(output, "output")
    read = partial(load_images, data, config=config, reading=_reading(config, names[1], folder, listener))
    if isinstance(model, os.PathLike):
        model = str(model)
    if isinstance(model, str) and _is_folder_of_a_model(Path(model)):
        model = load_bundle(model, trust_remote_code=config.trust_code).model
        if not isinstance(model, TransferModel):
            raise ModelError(
                "this bundle is folded and cannot be trained; start from a bundle written by `basisprune train`"
            )
    if isinstance(model, nn.Module) and hasattr(model, "input_spec"):
        network, splits = _known_network(model, read, config)
    else:
        network, splits = _new_network(model, read, config)
    return Job(network, splits, config, *names)


def _is_folder_of_a_model(path: Path) -> bool:
    """Whether the path, and not a timm model of that name, is meant; an output folder may be named like the model."""
    return holds_bundle(path) or (path.is_dir() and not timm.is_model(path.name))


def _known_network(model: nn.Module, read: _Read, config: RunConfig) -> tuple[nn.Module, Splits]:
    """A model with an input spec, and its images."""
    spec, size = spec_of(model), config.images.size
    if size is not None and (size, size) != spec.size:
        height, width = spec.size
        raise ConfigError(f"size: {size} given, but the model takes {height}x{width} images; omit it")
    splits = read(spec.size)
    if spec.white is not None:
        return model, reread(splits, white=spec.white)
    return _with_white(model, splits), splits


def _new_network(model: str | nn.Module, read: _Read, config: RunConfig) -> tuple[nn.Module, Splits]:
    side = config.images.size
    splits = read(None if side is None else (side, side))
    by_name = isinstance(model, str) and ":" not in model
    network = transfer_model(model, splits.num_classes, pretrained=config.pretrained and by_name, input_size=side)
    return _with_white(network, splits), reread(splits, size=network.input_spec.size)


def _with_white(network: nn.Module, splits: Splits) -> nn.Module:
    """The network, which knows what is white in deep images of the splits; the one given is not changed."""
    white = white_of(splits)
    if white is None:
        return network
    other = copy.copy(network)  # its layers are the same
    vars(other)["input_spec"] = replace(spec_of(network), white=white)
    return other


def _reading(config: RunConfig, data: str, output: Path | None, listener: Listener | None) -> Reading:
    images = config.images
    manifest = None if output is None else _chosen_before(output, data)
    return Reading(groups=images.groups, strict=images.strict, manifest=manifest, listener=listener)


def _chosen_before(output: Path, data: str) -> Manifest | None:
    """The images of the run in the folder; None where there is none, or one on other data, which is refused later."""
    if not (output / IMAGES).exists() or not (output / CONFIG).exists():
        return None
    return read_manifest(output / IMAGES) if read_settings(output / CONFIG).get("data") == data else None


def load_images(data: Source, size: tuple[int, int] | None, config: RunConfig, reading: Reading) -> Splits:
    """The images at that size, split according to the settings; some are set aside to confirm an accuracy budget."""
    images, goal = config.images, config.goal
    confirms = isinstance(goal, Budget) and goal.is_about_accuracy
    with random_numbers_kept():  # what a dataset draws must not decide on a new classifier
        return load_data(
            data,
            size=size,
            val_fraction=images.val_fraction,
            test_fraction=images.test_fraction,
            confirm_fraction=images.confirm_fraction if confirms else 0.0,
            limit=images.limit,
            seed=config.seed,
            reading=reading,
        )


def _called(given: object) -> str:
    """The name of a model or data in the settings."""
    return str(given) if isinstance(given, str | os.PathLike) else f"a {type(given).__name__}{IN_PYTHON}"
