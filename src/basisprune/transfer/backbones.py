"""Networks to start from: timm names, factories, modules; and their weights from local files."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from basisprune.errors import ModelError, nearest
from basisprune.torchkit.kinds import refuse_odd
from basisprune.torchkit.weight_norms import copied, plain_weights

_PICKLED = (".pth", ".pt", ".bin")
_LISTED = 5


def build_backbone(
    backbone: str | nn.Module, *, pretrained: bool = False, size: tuple[int, int] | None = None
) -> nn.Module:
    """A network of its own, in eval mode, every float parameter trainable.

    `backbone` is a timm name, `"package.module:factory"`, or a module, which is copied. `size` goes to
    timm models that are built for one image size. Raises ModelError if there is no such network.

    >>> module = nn.Conv2d(3, 8, 1)
    >>> build_backbone(module) is module
    False
    """
    if not isinstance(backbone, str | nn.Module):
        raise ModelError(
            f"{type(backbone).__name__} given; a timm name, 'package.module:factory' or a module is needed"
        )
    is_timm = isinstance(backbone, str) and ":" not in backbone
    if pretrained and not is_timm:
        raise ModelError(
            f"pretrained=True is for timm names, and {_describe(backbone)} is none; "
            "build it with its weights, or pass weights="
        )
    if isinstance(backbone, nn.Module):
        refuse_odd(backbone)
        model = _copy(backbone)
    elif is_timm:
        model = _from_timm(backbone, pretrained, size)
    else:
        model = plain_weights(_from_factory(backbone))
        refuse_odd(model)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model.eval()


def load_weights(model: nn.Module, path: str | Path, *, optional: Collection[str] = ()) -> None:
    """Fills the model from a `.safetensors`, `.pth`, `.pt` or `.bin` file, which is never unpickled freely.

    Every entry of the model must be in the file with its shape, and the file may hold nothing else, apart
    from the `optional` keys and auxiliary heads. Raises ModelError that lists what does not fit; the model
    is then unchanged.
    """
    path = Path(path)
    state = _state_dict(path)
    own = model.state_dict()
    wrong = [f"{key} is {_dims(state[key])}, wanted {_dims(own[key])}" for key in own.keys() & state.keys()
             if state[key].shape != own[key].shape]  # fmt: skip
    # Files of old or without metadata lack the counter of batches, which has no say in the function.
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    unknown = [key for key in state if key not in own and key not in optional and not _is_auxiliary(key)]
    faults = {"missing": missing, "of another shape": sorted(wrong), "unknown": unknown}
    if any(faults.values()):
        raise ModelError.of(
            f"{path}: the weights do not fit {type(model).__name__}; pass the file that belongs to this network",
            [f"{len(keys)} {fault}: {_first(keys)}" for fault, keys in faults.items() if keys],
        )
    model.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def _describe(backbone: str | nn.Module) -> str:
    return repr(backbone) if isinstance(backbone, str) else f"a {type(backbone).__name__}"


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
    if not timm.is_model(name):
        hint = nearest(name.partition(".")[0], timm.list_models(), most=_LISTED) or " See timm.list_models()."
        raise ModelError(f"timm has no model {name!r}.{hint} Modules and 'package.module:factory' work too")
    # A few models take only an int, and all take one for squares.
    sized = {} if size is None else {"img_size": size[0] if size[0] == size[1] else size}
    try:
        try:
            model: nn.Module = timm.create_model(name, pretrained=pretrained, **sized)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            model = timm.create_model(name, pretrained=pretrained)  # takes images of any size
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        if pretrained:
            raise ModelError(
                f"{name}: no pretrained weights could be had: {cause}; if you have them in a file, pass "
                "pretrained=False and weights='file.safetensors' (or .pth, .pt, .bin)"
            ) from error
        raise ModelError(f"{name}: timm cannot build it: {cause}") from error
    return model


def _from_factory(reference: str) -> nn.Module:
    """What the function makes; whatever goes wrong in the code of others, and even if it exits, is a ModelError."""
    module_name, _, attribute = reference.partition(":")
    if not (attribute.isidentifier() and all(name.isidentifier() for name in module_name.split("."))):
        raise ModelError(f"{reference!r} is not a factory; write 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
        factory = getattr(module, attribute, None)
    except ImportError as error:
        raise ModelError(f"{reference!r}: cannot import {module_name}: {error}; is it on the path?") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"{reference!r}: cannot import {module_name}: {_said(error)}") from error
    if not callable(factory):
        raise ModelError(f"{reference!r}: {module_name} has no function {attribute!r}; write 'package.module:function'")
    try:
        model = factory()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{reference!r}: calling it without arguments failed: {_said(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{reference!r} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _said(error: BaseException) -> str:
    return "it ends the program" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors in the file by name, without wrapping dicts and without the prefix of DataParallel."""
    content: object = _read(path)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ModelError(
            f"{path}: contains no state dict (names and tensors, alone or under 'state_dict' or 'model'); "
            "save one with safetensors.torch.save_file(model.state_dict(), ...)"
        )
    return {str(key).removeprefix("module."): value for key, value in content.items()}


def _read(path: Path) -> object:
    if not path.is_file():
        raise ModelError(f"{path}: no such file; pass a local {', '.join(('.safetensors', *_PICKLED))} file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix in _PICKLED:
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: damaged, or holds objects other than tensors, which could run code when read; "
            "save only the state dict, with safetensors.torch.save_file(model.state_dict(), ...)"
        ) from error
    except Exception as error:  # a damaged file fails in many ways
        raise ModelError(f"{path}: cannot be read, perhaps damaged or cut off: {error}; fetch it again") from error
    raise ModelError(f"{path}: weights of this kind are not read; allowed are .safetensors, .pth, .pt and .bin")


def _is_auxiliary(key: str) -> bool:
    return key.lower().startswith("aux")


def _dims(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _first(keys: list[str]) -> str:
    return ", ".join(keys[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")
