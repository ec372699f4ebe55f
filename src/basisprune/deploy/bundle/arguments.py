"""What the public functions of a bundle are given, checked before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from basisprune.errors import ConfigError
from basisprune.torchkit.kinds import odd_kinds
from basisprune.types import BasisPlan, BlockPlan, FilterPlan

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_saving(
    model: object,
    classes: object,
    metrics: object,
    plans: object,
    factory: object,
    input_shape: object,
    check_inputs: object,
) -> None:
    """Raises ConfigError that lists all arguments of `save_pretrained` which are not what they must be."""
    faults = _model_faults(model)
    if classes is not None and not _is_list_of(classes, str):
        faults.append(f"classes: {str(classes)[:80]!r} given, a list of names is needed")
    if metrics is not None and not isinstance(metrics, Mapping):
        faults.append(f"metrics: {type(metrics).__name__} given, numbers by name are needed")
    if not _is_list_of(plans, (BasisPlan, FilterPlan, BlockPlan)):
        found = type(plans).__name__ if not isinstance(plans, list | tuple) else _first_other(plans)
        faults.append(f"plans: {found} given; allowed are BasisPlan, FilterPlan and BlockPlan")
    faults += _text_faults(factory=factory)
    if input_shape is not None and not _is_list_of(input_shape, int):
        faults.append(f"input_shape: {input_shape!r} given, whole numbers such as (3, 224, 224) are needed")
    if not _is_list_of(check_inputs, Tensor):
        faults.append(f"check_inputs: {type(check_inputs).__name__} given, a list of batches (tensors) is needed")
    _raise("save_pretrained", faults)


def check_loading(factory: object, revision: object, trust_remote_code: object) -> None:
    """Raises ConfigError that lists all arguments of `load_bundle` which are not what they must be."""
    faults = _text_faults(factory=factory, revision=revision)
    if not isinstance(trust_remote_code, bool):
        faults.append(f"trust_remote_code: {trust_remote_code!r} given, True or False is needed")
    _raise("load_bundle", faults)


def check_repo_id(repo_id: object) -> None:
    """Raises ConfigError for what is not a name of a model on the hub."""
    if not isinstance(repo_id, str) or not HUB_ID.fullmatch(repo_id):
        _raise("push_to_hub", [f"repo_id: {repo_id!r} given; write 'owner/name'"])


def _model_faults(model: object) -> list[str]:
    """Why the network cannot be saved, whatever else is given."""
    if not isinstance(model, nn.Module):
        return [f"model: {type(model).__name__} given, a torch.nn.Module is needed"]
    return [f"model: {kind} given; pass the plain network that it was made of" for kind in odd_kinds(model)]


def _text_faults(**values: object) -> list[str]:
    return [
        f"{name}: {value!r} given, a text is needed"
        for name, value in values.items()
        if value is not None and (not isinstance(value, str) or not value)
    ]


def _is_list_of(values: object, kind: type | tuple[type, ...]) -> bool:
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return is_list and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)  # type: ignore[attr-defined]


def _first_other(plans: Sequence[object]) -> str:
    return next(type(plan).__name__ for plan in plans if not isinstance(plan, BasisPlan | FilterPlan | BlockPlan))


def _raise(where: str, faults: list[str]) -> None:
    if faults:
        raise ConfigError.of(where, faults)
