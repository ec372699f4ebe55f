"""A network that was trained for its classes already: it keeps its head and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from basisprune.errors import ConfigError, ModelError, pass_on
from basisprune.torchkit.kinds import bake_parametrizations
from basisprune.torchkit.surgery import model_heads
from basisprune.torchkit.watching import example_input
from basisprune.transfer.backbones import architecture_name, build_backbone, hints_of_name
from basisprune.transfer.body import silence_auxiliary_heads
from basisprune.transfer.checkpoints import messages, read_checkpoint, set_weights
from basisprune.transfer.hints import NO_HINTS, Hints, hints_of_network
from basisprune.transfer.model import ModelSource, image_channels, known_spec
from basisprune.types import InputSpec

LOGITS = "logits"
_WAY_OUT = "one tensor of scores (N, classes) is needed, or an output with .logits; wrap the network to return that"


class KeptModel(nn.Module):
    """Scores (N, classes) for images (N, C, H, W), by a network as its owner has trained it.

    `part` is the name of what counts of the network's output, such as "logits" for those of Hugging Face; None where
    the output is the scores themselves.
    """

    def __init__(
        self,
        network: nn.Module,
        input_spec: InputSpec,
        num_classes: int,
        *,
        part: str | None = None,
        source: ModelSource | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.input_spec = input_spec
        self.num_classes = num_classes
        self.part = part
        self.source = source or ModelSource(None, None)

    def get_classifier(self) -> list[nn.Module]:
        return model_heads(self.network)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x)
        return output if self.part is None else getattr(output, self.part)


@dataclass(frozen=True)
class KeptFacts:
    """What else is known of a network that keeps its head: messages, and names of classes."""

    said: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None


def kept_model(
    network: str | nn.Module,
    *,
    pretrained: bool = False,
    weights: str | Path | None = None,
    weights_key: str | None = None,
    input_hints: Hints = NO_HINTS,
) -> KeptModel:
    """The network in eval mode with its own head and weights, ready for `compress`, `fit` and `evaluate`.

    `network` is anything that `transfer_model` takes; a module is copied. `weights` is a file or folder with all its
    weights: safetensors, .pt, .pth, .ckpt, a folder of Hugging Face or timm; `weights_key` names the entry in it.
    Images are prepared as `input_hints` say; for what those leave open, as the network's own `input_spec`, the files
    beside the weights, timm or torchvision say, and otherwise as for ImageNet, at 224x224.

    Auxiliary heads go, and weights that torch's parametrizations compute become plain ones.

    Raises ModelError for a network that does not output scores of classes, and lists weights that do not fit.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    >>> model = kept_model(net, input_hints=Hints(size=(32, 32)))
    >>> model.num_classes, model.input_spec.size, torch.equal(model.network[3].weight, net[3].weight)
    (4, (32, 32), True)
    """
    return kept_with_facts(
        network, pretrained=pretrained, weights=weights, weights_key=weights_key, input_hints=input_hints
    )[0]


def kept_with_facts(
    network: str | nn.Module,
    *,
    pretrained: bool = False,
    weights: str | Path | None = None,
    weights_key: str | None = None,
    input_hints: Hints = NO_HINTS,
) -> tuple[KeptModel, KeptFacts]:
    """What `kept_model` gives, and what else was learnt of it."""
    _check_weights(pretrained, weights, weights_key)
    built = build_backbone(network, pretrained=pretrained, size=input_hints.size)
    own = _own_hints(network, built)
    said: list[str] = []
    beside = NO_HINTS
    if weights is not None:
        found = read_checkpoint(weights, key=weights_key)
        said = messages(found, set_weights(built, found))
        beside = found.hints
    silence_auxiliary_heads(built)
    bake_parametrizations(built)
    known = input_hints.over(own).over(beside).over(hints_of_network(built)).over(hints_of_name(network))
    spec = known.spec(image_channels(built))
    if (given := known_spec(built)) is not None:
        spec = replace(spec, white=given.white)
    part, classes = _output(built, spec)
    name = architecture_name(network, built)
    source = ModelSource(name, None, is_trusted=name == network)
    model = KeptModel(built, spec, classes, part=part, source=source)
    return model.eval(), KeptFacts(tuple(said), known.classes)


def _check_weights(pretrained: bool, weights: str | Path | None, weights_key: str | None) -> None:
    if pretrained and weights is not None:
        raise ConfigError("kept_model: pretrained=True and weights= exclude each other; leave one out")
    if weights_key is not None and weights is None:
        raise ConfigError(f"weights_key: {weights_key!r} given without weights, which it is an entry of")


def _own_hints(network: str | nn.Module, built: nn.Module) -> Hints:
    spec, names = known_spec(built), getattr(built, "classes", None)
    is_named = isinstance(names, Sequence) and bool(names) and all(isinstance(name, str) for name in names)
    classes = tuple(names) if is_named and isinstance(network, nn.Module) else None  # type: ignore[arg-type]
    if spec is None:
        return Hints(classes=classes)
    return Hints(spec.image_size, spec.mean, spec.std, spec.interpolation, classes)


def _output(network: nn.Module, spec: InputSpec) -> tuple[str | None, int]:
    """Which part of the network's output has the scores, and of how many classes."""
    shape, name = spec.shape, type(network).__name__
    try:
        with torch.no_grad():
            output: object = network.eval()(example_input(network, shape))
    except Exception as error:
        pass_on(error)
        raise ModelError(
            f"{name} does not run on images of shape {shape}: {type(error).__name__}: {error}; if it wants another "
            "size or number of channels, pass size, mean and std"
        ) from error
    part = None if isinstance(output, Tensor) else LOGITS
    scores = output if part is None else getattr(output, LOGITS, None)
    if not isinstance(scores, Tensor):
        raise ModelError(f"{name} returns {type(output).__name__}; {_WAY_OUT}")
    if scores.dim() != 2 or scores.shape[0] != 2:
        raise ModelError(f"{name} returns {tuple(scores.shape)} for two images; {_WAY_OUT}")
    if scores.shape[1] > 1 and bool((scores >= 0).all()) and torch.allclose(scores.sum(1), scores.new_ones(2)):
        raise ModelError(f"{name} returns probabilities; it must return the scores before the softmax, as trained")
    return part, scores.shape[1]
