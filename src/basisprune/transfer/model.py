"""Networks for your classes: a backbone with a new head, or a network that keeps its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from basisprune.errors import ConfigError, ModelError, TrainingError, pass_on
from basisprune.torchkit.running import bake_parametrizations, copied
from basisprune.torchkit.surgery import model_heads
from basisprune.torchkit.watching import Shape, example_input, features_of, watch_run
from basisprune.transfer.backbones import architecture_name, build_backbone, hints_of_name
from basisprune.transfer.body import extract_body, insert_norms, silence_auxiliary_heads
from basisprune.transfer.checkpoints import Checkpoint, load_weights, messages, read_checkpoint, set_weights
from basisprune.transfer.hints import NO_HINTS, Hints, hints_of_network
from basisprune.types import InputSpec

_MOST_CLASSES = 1_000_000
Layout: TypeAlias = Literal["NCHW", "NHWC", "NLC", "NC"]


@dataclass(frozen=True)
class ModelSource:
    """The name by which an architecture can be built again: of timm, or `"package.module:factory"`; None for a module.

    A function is called to save the network only if `is_trusted`: its caller named it, and no file did.
    """

    backbone: str | None
    insert_norm: bool | None = True
    is_trusted: bool = field(default=False, compare=False)


class GlobalPool(nn.Module):
    """The mean over all positions: (N, C), from features in one fixed layout.

    The first `prefix_tokens` of "NLC" features, such as a class token, are left out.

    >>> import torch
    >>> GlobalPool("NHWC")(torch.ones(2, 7, 7, 64)).shape
    torch.Size([2, 64])
    """

    def __init__(self, layout: Layout, prefix_tokens: int = 0) -> None:
        super().__init__()
        self.layout: Layout = layout
        self.prefix_tokens = prefix_tokens

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "NCHW":
            return F.adaptive_avg_pool2d(x, 1).flatten(1)
        if self.layout == "NHWC":
            return x.mean((1, 2))
        if self.layout == "NLC":
            return x[:, self.prefix_tokens :].mean(1)
        return x

    def extra_repr(self) -> str:
        return self.layout + (f", prefix_tokens={self.prefix_tokens}" if self.prefix_tokens else "")


class TransferModel(nn.Module):
    """Scores (N, classes) for images (N, C, H, W): backbone, pool, dropout, classifier."""

    def __init__(
        self,
        backbone: nn.Module,
        pool: GlobalPool,
        dropout: nn.Dropout,
        classifier: nn.Linear,
        input_spec: InputSpec,
        source: ModelSource | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pool = pool
        self.dropout = dropout
        self.classifier = classifier
        self.input_spec = input_spec
        self.source = source

    def forward_features(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(features_of(self.backbone)(x))
        return pooled

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.dropout(self.forward_features(x)))
        return scores


def transfer_model(
    backbone: str | nn.Module,
    num_classes: int,
    *,
    pretrained: bool = False,
    weights: str | Path | Checkpoint | None = None,
    dropout: float = 0.5,
    input_size: int | tuple[int, int] | None = None,
    input_spec: InputSpec | None = None,
    insert_norm: bool = True,
) -> TransferModel:
    """A network in eval mode for `num_classes` classes on the body of `backbone`, as in the paper's section 3.3.

    `backbone` is a timm name (also as `"timm:name"`, `"hf-hub:owner/name"` or `"local-dir:folder"`),
    `"torchvision:name"`, `"package.module:factory"`, or a module, which is copied and stays as it is. Its layers up to
    the last feature map are kept; its head makes way for global average pooling, dropout and one linear layer. Convs
    without normalisation get a batch norm, if `insert_norm`. `weights` is a local file or folder for the backbone, as
    `load_weights` reads it, or what `read_checkpoint` gave. The network expects images as `input_spec` says: by default
    what timm or torchvision knows of the model, otherwise 224x224 with ImageNet's mean and deviation.

    Raises ConfigError for wrong settings, ModelError for a backbone that cannot be taken.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 1000))
    >>> model = transfer_model(net, 10, input_size=32)
    >>> model(torch.zeros(2, 3, 32, 32)).shape, model.classifier
    (torch.Size([2, 10]), Linear(in_features=8, out_features=10, bias=True))
    """
    _check_settings(num_classes, pretrained, weights, dropout, input_size, input_spec)
    size = (input_size, input_size) if isinstance(input_size, int) else input_size
    if input_spec is not None:
        size = input_spec.image_size
    body = build_backbone(backbone, pretrained=pretrained, size=size)
    spec = input_spec or hints_of_network(body).over(hints_of_name(backbone)).spec(image_channels(body))
    spec = spec if size is None else replace(spec, size=size)
    name = architecture_name(backbone, body)
    example = example_input(body, spec.shape)

    all_keys = body.state_dict().keys()
    body = extract_body(body, example)
    if weights is not None:
        load_weights(body, weights, optional=all_keys - body.state_dict().keys())
    if insert_norm:
        body = insert_norms(body, example)
    model = _assemble(body, num_classes, dropout, spec, example).eval()
    model.source = ModelSource(name, insert_norm, is_trusted=name == backbone)
    return model


def _check_settings(
    num_classes: int,
    pretrained: bool,
    weights: str | Path | Checkpoint | None,
    dropout: float,
    input_size: int | tuple[int, int] | None,
    input_spec: InputSpec | None,
) -> None:
    faults = []
    if not 1 <= num_classes <= _MOST_CLASSES:
        faults.append(f"num_classes: {num_classes} given, 1 to {_MOST_CLASSES:,} are possible")
    if not 0 <= dropout < 1:
        faults.append(f"dropout: {dropout} given, allowed is 0 <= dropout < 1")
    if pretrained and weights is not None:
        faults.append("pretrained=True and weights= exclude each other; leave one out")
    if input_size is not None and input_spec is not None:
        faults.append("input_size= and input_spec= exclude each other; leave one out")
    sides = (input_size,) if isinstance(input_size, int) else input_size or (1,)
    if min(sides) < 1:
        faults.append(f"input_size: {input_size} given, each side must be at least 1")
    if faults:
        raise ConfigError.of("transfer_model", faults)


def image_channels(model: nn.Module) -> int:
    """How many channels the network's images have, by its first conv."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return 1 if first is not None and first.in_channels == 1 else 3


def _assemble(body: nn.Module, num_classes: int, dropout: float, spec: InputSpec, example: Tensor) -> TransferModel:
    shape = watch_run(body, example).output_shape
    layout = _layout(body, shape)
    channels = shape[1 if layout in ("NCHW", "NC") else -1]
    prefix_tokens = getattr(body, "num_prefix_tokens", 0) if layout == "NLC" else 0
    classifier = nn.Linear(channels, num_classes, device=example.device, dtype=example.dtype)
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    return TransferModel(body, GlobalPool(layout, prefix_tokens), nn.Dropout(dropout), classifier, spec)


def _layout(body: nn.Module, shape: Shape) -> Layout:
    if len(shape) < 4:
        return "NC" if len(shape) == 2 else "NLC"
    channels = getattr(body, "num_features", None)
    last = shape[3] == channels != shape[1]
    return "NHWC" if last or str(getattr(body, "output_fmt", "")) == "NHWC" else "NCHW"


def known_spec(model: nn.Module) -> InputSpec | None:
    """How the model wants its images, if it says so."""
    spec = getattr(model, "input_spec", None)
    return spec if isinstance(spec, InputSpec) else None


def with_shape(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The model, which knows that its inputs have this shape and are prepared already; a copy if it did not know."""
    known = known_spec(model)
    if known is not None and known.shape == shape:
        return model
    other = copied(model)
    other.input_spec = InputSpec.as_it_is(shape)  # type: ignore[assignment]
    return other


def spec_of(model: nn.Module) -> InputSpec:
    """How the model wants its images; raises TrainingError for a model that does not say so."""
    spec = known_spec(model)
    if spec is None:
        raise TrainingError(
            f"{type(model).__name__} does not say how its images are prepared; build it with transfer_model, "
            "or set model.input_spec = InputSpec(...)"
        )
    return spec


LOGITS = "logits"
_WAY_OUT = "one tensor of scores (N, classes) is needed, or an output with .logits; wrap the network to return that"


class KeptModel(nn.Module):
    """Scores (N, classes) for images (N, C, H, W), by a network as its owner has trained it.

    `part` is the name of what counts of its output, such as "logits"; None where that is the scores themselves.
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
