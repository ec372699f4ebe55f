"""Networks to start from: names of timm and torchvision, factories, modules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import timm
import torchvision
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from basisprune.errors import ModelError, nearest
from basisprune.files import open_file
from basisprune.torchkit.imports import call_of, called, is_factory, named_object
from basisprune.torchkit.running import copied, plain_weights, refuse_odd
from basisprune.transfer.checkpoints import PICKLED, refuse_bombs
from basisprune.transfer.hints import NO_HINTS, Hints

_TIMM, _TORCHVISION = "timm", "torchvision"
_PLACES = ("hf-hub", "local-dir")  # of networks that timm builds as a config.json there says
_REVIEWED = ("torch", "torchvision", "timm", "basisprune")  # whose networks come out of files too
_WEIGHTS = re.compile(r"(^|_)(weights|pretrained)(_|$)")
_LISTED = 5
_MOST_MODULES, _MOST_NUMBERS = 20_000, 3 * 10**9
"""Bounds for networks that a config.json describes; the largest of timm have 4,000 layers and 2 billion weights."""
_WEIGHTS_FILE = "pass pretrained=False and weights='file' (on the command line --no-pretrained --weights FILE)"


def is_known_name(backbone: object) -> bool:
    """Whether timm or torchvision builds a network of that name, so that there may be pretrained weights for it.

    >>> [is_known_name(name) for name in ("resnet18", "torchvision:resnet18", "hf-hub:me/mine", "my_module:network")]
    [True, True, True, False]
    """
    if not isinstance(backbone, str):
        return False
    source, colon, _ = backbone.partition(":")
    return not colon or source.replace("_", "-") in (_TIMM, _TORCHVISION, *_PLACES)


def is_elsewhere(backbone: str) -> bool:
    """Whether it names a network that timm would fetch from the hub or read from a folder.

    >>> [is_elsewhere(name) for name in ("resnet18", "torchvision:resnet18", "hf-hub:me/mine", "local-dir:mine")]
    [False, False, True, True]
    """
    return backbone.partition(":")[0].replace("_", "-") in _PLACES


def architecture_name(backbone: str | nn.Module, model: nn.Module) -> str | None:
    """Return the name by which the architecture of a network can be built again; None for a module."""
    if not isinstance(backbone, str):
        return None
    source, _, name = backbone.partition(":")
    if source == _TIMM:
        return name
    if source.replace("_", "-") not in _PLACES:
        return backbone
    config = getattr(model, "pretrained_cfg", None)
    found = config.get("architecture") if isinstance(config, dict) else None
    return found if isinstance(found, str) and ":" not in found and timm.is_model(found) else backbone


def refuse_unknown_name(backbone: str) -> None:
    """Raise ModelError for a name that timm or torchvision does not have."""
    source, colon, name = backbone.partition(":")
    if source == _TORCHVISION:
        known = torchvision.models.list_models()
        if name not in known:
            hint = nearest(name, known, most=_LISTED) or " See torchvision.models.list_models()."
            raise ModelError(f"torchvision has no model {name!r}.{hint}")
    elif not colon or source == _TIMM:
        name = name if colon else source
        if not timm.is_model(name):
            hint = nearest(name.partition(".")[0], timm.list_models(), most=_LISTED) or " See timm.list_models()."
            raise ModelError(f"timm has no model {name!r}.{hint} Modules and 'package.module:factory' work too")


def build_backbone(
    backbone: str | nn.Module, *, pretrained: bool = False, size: tuple[int, int] | None = None
) -> nn.Module:
    """A network of its own, in eval mode, every float parameter trainable."""
    if not isinstance(backbone, str | nn.Module):
        raise ModelError(
            f"{type(backbone).__name__} given; a timm name, 'package.module:factory' or a module is needed"
        )
    if pretrained and not is_known_name(backbone):
        given = repr(backbone) if isinstance(backbone, str) else f"a {type(backbone).__name__}"
        raise ModelError(
            f"pretrained=True is for timm names and torchvision:NAME, and {given} is none; "
            "build it with its weights, or pass weights="
        )
    if isinstance(backbone, nn.Module):
        refuse_odd(backbone)
        model = _copy(backbone)
    elif is_known_name(backbone):
        refuse_unknown_name(backbone)
        source, _, name = backbone.partition(":")
        if source == _TORCHVISION:
            model = _from_torchvision(name, pretrained)
        else:
            model = _from_timm(name if source == _TIMM else backbone, pretrained, size)
    else:
        model = plain_weights(_from_factory(backbone))
        refuse_odd(model)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model.eval()


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copied(module)
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__} cannot be copied: {error}; pass 'package.module:factory', "
            "a function that builds it"
        ) from error


def _from_timm(name: str, pretrained: bool, size: tuple[int, int] | None) -> nn.Module:
    # With its old classifier, so that weight files of the whole network fit; `extract_body` drops it.
    # A few models take only an int, and all take one for squares.
    sized = {} if size is None else {"img_size": size[0] if size[0] == size[1] else size}
    try:
        if pretrained:
            _measure_weights(name)
        with _refusing_giants(name) if ":" in name else nullcontext():
            try:
                model: nn.Module = timm.create_model(name, pretrained=pretrained, **sized)
            except TypeError as error:
                if "img_size" not in str(error):
                    raise
                model = timm.create_model(name, pretrained=pretrained)  # takes images of any size
    except ModelError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        if pretrained:
            raise ModelError(
                f"{name}: no pretrained weights could be loaded: {cause}; if you have them in a file "
                f"(.safetensors, .pth, .pt, .bin), {_WEIGHTS_FILE}"
            ) from error
        raise ModelError(f"{name}: timm cannot build it: {cause}") from error
    if ":" in name and any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(f"{name}: its config.json asks for a network without values")
    return model


def _measure_weights(name: str) -> None:
    source, _, folder = name.partition(":")
    if source.replace("_", "-") != _PLACES[1]:
        return
    for path in Path(folder).iterdir():
        if path.suffix.lower() in PICKLED:
            with open_file(path) as file:
                refuse_bombs(file)


@contextmanager
def _refusing_giants(name: str) -> Iterator[None]:
    """Raise ModelError while a network is built that is far larger than any of timm's: a file may ask for it."""
    modules = numbers = 0

    def count_module(_parent: nn.Module, _name: str, _module: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > _MOST_MODULES:
            raise ModelError(f"{name}: has more than {_MOST_MODULES:,} layers; its config.json asks for too much")

    def count_numbers(_parent: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal numbers
        numbers += 0 if parameter is None else parameter.numel()
        if numbers > _MOST_NUMBERS:
            raise ModelError(f"{name}: has more than {_MOST_NUMBERS:,} weights; its config.json asks for too much")

    handles = (
        register_module_module_registration_hook(count_module),
        register_module_parameter_registration_hook(count_numbers),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _from_torchvision(name: str, pretrained: bool) -> nn.Module:
    # Two networks would otherwise take their time to draw weights, and warn of it.
    options: dict[str, object] = {}
    if not pretrained:
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        if "weights_backbone" in inspect.signature(torchvision.models.get_model_builder(name)).parameters:
            options["weights_backbone"] = None  # or it would fetch those
    try:
        model: nn.Module = torchvision.models.get_model(name, weights="DEFAULT" if pretrained else None, **options)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        said = "no pretrained weights could be loaded" if pretrained else "torchvision cannot build it"
        advice = f"; if you have them in a file, {_WEIGHTS_FILE}" if pretrained else ""
        raise ModelError(f"torchvision:{name}: {said}: {cause}{advice}") from error
    return model


def hints_of_name(backbone: object) -> Hints:
    """How images are prepared for a network of torchvision, as its pretrained weights say; nothing of any other."""
    source, _, name = str(backbone).partition(":") if isinstance(backbone, str) else ("", "", "")
    if source != _TORCHVISION or name not in torchvision.models.list_models():
        return NO_HINTS
    found = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    side = getattr(found, "crop_size", [None])[0]
    if side is None:  # not a classifier
        return NO_HINTS
    return Hints((side, side), tuple(found.mean), tuple(found.std), found.interpolation.value)


def _from_factory(reference: str) -> nn.Module:
    factory = named_object(reference, "factory", ModelError)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ModelError(
            f"{reference!r} is a {type(factory).__name__}; write 'package.module:function', of a function that builds "
            "the network"
        )
    model = called(reference, factory, ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{reference!r} returned {type(model).__name__}; it must return a torch.nn.Module")
    model.built_by = reference  # type: ignore[assignment]
    return model


def own_factory(model: nn.Module) -> str | None:
    """Return what builds the architecture anew, as far as the network itself tells; None where it does not.

    It may say so in an attribute `built_by`. timm notes a name, and huggingface_hub the arguments of its classes. Of
    any other class, attributes with the names of arguments are taken for these. Nothing is fetched: arguments that ask
    for pretrained weights are switched off. Whoever uses it must compare what is built, because this is a guess.

    >>> class Net(nn.Module):
    ...     built_by = "my_module:network"
    >>> own_factory(Net()), own_factory(timm.create_model("resnet18", num_classes=3))
    ('my_module:network', 'resnet18')
    """
    if is_factory(said := getattr(model, "built_by", None)):
        return str(said)
    kind, config = type(model), getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, Mapping) else None
    if isinstance(name, str) and ":" not in name and timm.is_model(name):
        return name
    if kind.__module__.partition(".")[0] in _REVIEWED:
        return None
    _, *wanted = inspect.signature(kind.__init__).parameters.values()
    defaults = {each.name: each.default for each in wanted if each.kind is not each.VAR_POSITIONAL}
    rest = [defaults.pop(each.name) for each in wanted if each.kind is each.VAR_KEYWORD]
    noted = getattr(model, "_hub_mixin_config", None)
    held = (
        dict(noted) if isinstance(noted, Mapping) else {key: vars(model)[key] for key in defaults if key in vars(model)}
    )
    found = defaults | {key: value for key, value in held.items() if key in defaults or (rest and key[0] != "_")}
    if inspect.Parameter.empty in found.values():
        return None
    found |= {key: False if value is True else None for key, value in found.items() if _WEIGHTS.search(key) and value}
    return call_of(kind, {key: value for key, value in found.items() if repr(value) != repr(defaults.get(key, rest))})
