"""The network that a run starts from: opened or built, with the weights, preparation and head that settings name."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import timm
from torch import nn

from basisprune.callback import Callback, NullCallback
from basisprune.data import Splits
from basisprune.data.split import reread, white_of
from basisprune.deploy.bundle import holds_bundle, load_bundle
from basisprune.deploy.graphs import FoldedModel
from basisprune.errors import ConfigError, ModelError
from basisprune.runs.settings import RunConfig
from basisprune.torchkit.running import several
from basisprune.training.trainable import classes_of
from basisprune.transfer.backbones import build_backbone, is_known_name, refuse_unknown_name
from basisprune.transfer.checkpoints import messages, read_checkpoint, set_weights
from basisprune.transfer.hints import NO_HINTS, Hints
from basisprune.transfer.model import (
    KeptModel,
    TransferModel,
    kept_model,
    kept_with_facts,
    spec_of,
    transfer_model,
    with_shape,
)
from basisprune.transfer.several import SeveralInputs

_LISTED = 10
_Read = Callable[[tuple[int, int] | None], Splits]


def opened(model: str | os.PathLike[str] | nn.Module, config: RunConfig) -> str | nn.Module:
    """The model of a folder, or what was given."""
    if isinstance(model, os.PathLike):
        model = str(model)
    if isinstance(model, str) and is_folder_of_a_model(Path(model)):
        model = load_bundle(model, trust_remote_code=config.trust_code).model
        if isinstance(model, FoldedModel) or not hasattr(model, "input_spec"):
            raise ModelError(
                "this bundle is folded and cannot be trained; start from a bundle written by `basisprune train`"
            )
        if not isinstance(model, TransferModel) and not config.keep_head:
            model = kept_model(model)  # as it was trained there
    if is_known_name(model):  # before any image is opened
        refuse_unknown_name(str(model))
    return model


def is_folder_of_a_model(path: Path) -> bool:
    """Whether the path, and not a timm model of that name, is meant; an output folder may be named like the model."""
    return holds_bundle(path) or (path.is_dir() and not timm.is_model(path.name))


def whole_network(
    model: str | os.PathLike[str] | nn.Module,
    shape: tuple[int, ...],
    config: RunConfig,
    callback: Callback,
    given: object = None,
) -> nn.Module:
    """The network as it is, with its head, which knows the shape of its inputs; a copy of the one that is given.

    `given` are the inputs of a batch: a network of several is one of one from here on, see `SeveralInputs`.
    """
    if isinstance(model, os.PathLike):
        model = str(model)
    if isinstance(model, str) and is_folder_of_a_model(Path(model)):
        model = load_bundle(model, trust_remote_code=config.trust_code).model
    if isinstance(model, str) and ":" not in model:
        raise ConfigError(
            f"model: {model!r} given with loaders of your own; pass a network that is ready for them, a module or "
            "'package.module:factory'"
        )
    pretrained = config.pretrained and config.weights is None and is_known_name(model)
    network = build_backbone(model, pretrained=pretrained)
    _fill(network, config, callback)
    if isinstance(given, tuple | list | dict) and len(several(given)) > 1 and not isinstance(network, SeveralInputs):
        network = SeveralInputs.of(network, given)
    return with_shape(network, shape)


def known_network(model: nn.Module, read: _Read, config: RunConfig) -> tuple[nn.Module, Splits]:
    """A model with an input spec, and its images."""
    spec, size = spec_of(model), config.size
    if size is not None and (size, size) != spec.size:
        height, width = spec.size
        raise ConfigError(f"size: {size} given, but the model takes {height}x{width} images; omit it")
    splits = read(spec.image_size)
    if spec.white is not None:
        return model, reread(splits, white=spec.white)
    return _with_white(model, splits), splits


def kept_network(
    model: str | nn.Module, read: _Read, config: RunConfig, callback: Callback
) -> tuple[nn.Module, Splits]:
    """A network that is trained for the classes of the data, with its own head, and its images."""
    names: Sequence[str] | None = getattr(model, "classes", None)
    if isinstance(model, TransferModel | KeptModel):
        network, splits = known_network(with_own_weights(model, config, callback), read, config)
    else:
        network, facts = kept_with_facts(
            model,
            pretrained=config.pretrained and config.weights is None and is_known_name(model),
            weights=config.weights,
            weights_key=config.weights_key,
            input_hints=config.hints(config.size),
        )
        for line in facts.said:
            callback.log(line)
        names = facts.classes
        splits = read(network.input_spec.image_size)
        white = network.input_spec.white
        splits = splits if white is None else reread(splits, white=white)
        network = _with_white(network, splits)
    check_classes(network, splits, names, callback)
    return network, splits


def new_network(model: str | nn.Module, read: _Read, config: RunConfig) -> tuple[nn.Module, Splits]:
    """A known backbone or a network of the user's own with a new head, and its images."""
    side = config.size
    pretrained = config.pretrained and config.weights is None and is_known_name(model)
    weights = None if config.weights is None else read_checkpoint(config.weights, key=config.weights_key)
    splits = read(None if side is None else (side, side))
    network: nn.Module = transfer_model(
        model, splits.num_classes, pretrained=pretrained, weights=weights, input_size=side
    )
    network = with_own_weights(network, replace(config, weights=None), NullCallback())
    return _with_white(network, splits), reread(splits, size=spec_of(network).image_size)


def with_own_weights(model: nn.Module, config: RunConfig, callback: Callback) -> nn.Module:
    """The network, with the weights and the preparation that the settings name; the one given is not changed."""
    if config.weights is not None:
        model = copy.deepcopy(model)
        _fill(model, config, callback)
    given, spec = config.hints(None), spec_of(model)
    if given == NO_HINTS:
        return model
    other = copy.copy(model)  # its layers are the same
    own = Hints(spec.image_size, spec.mean, spec.std, spec.interpolation)
    other.input_spec = replace(given.over(own).spec(spec.channels), white=spec.white)  # type: ignore[assignment]
    return other


def _fill(network: nn.Module, config: RunConfig, callback: Callback) -> None:
    """Gives the network the weights that the settings name, if any, in place."""
    if config.weights is not None:
        found = read_checkpoint(config.weights, key=config.weights_key)
        for line in messages(found, set_weights(network, found)):
            callback.log(line)


def _with_white(network: nn.Module, splits: Splits) -> nn.Module:
    """The network, which knows what is white in deep images of the splits; the one given is not changed."""
    white = white_of(splits)
    if white is None:
        return network
    other = copy.copy(network)  # its layers are the same
    other.input_spec = replace(spec_of(network), white=white)  # type: ignore[assignment]
    return other


def check_classes(network: nn.Module, splits: Splits, names: Sequence[str] | None, callback: Callback) -> None:
    """Raises ModelError unless a network that keeps its head has the classes of the data.

    `names` are what the network calls them, if it is known. Where they differ, a message says what was made
    of them; where they are those of the data in another order, that is refused.
    """
    found, wanted = classes_of(network), splits.num_classes
    if found != wanted:
        raise ModelError(
            f"keep_head: the network distinguishes {found} classes, and the data has {wanted} "
            f"({listed(splits.classes)}); pass the data that it was trained for, or omit keep_head for a new head"
        )
    if names is None or tuple(names) == tuple(splits.classes):
        return
    if sorted(names) == sorted(splits.classes):
        raise ModelError(
            f"keep_head: the network has its classes in the order {listed(names)}, and the data in the order "
            f"{listed(splits.classes)}, which is that of sorted folder names; reorder the rows of its last layer, or "
            "name the folders so that they sort as the network has them"
        )
    callback.log(f"the network's classes {listed(names)} are taken for {listed(splits.classes)}, in this order")


def listed(names: Sequence[str]) -> str:
    """Return the first of the names, as text."""
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
