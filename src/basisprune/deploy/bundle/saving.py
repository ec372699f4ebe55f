"""A network to a folder (or the hub) and back, checked both ways."""

from __future__ import annotations

import copy
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.fx import GraphModule

from basisprune.deploy.bundle.files import CARD, PLANS, TENSORS, read_folder, write_folder
from basisprune.deploy.bundle.hub import HUB_ID, HubFolder, fetch, model_card
from basisprune.deploy.bundle.structure import describe, rebuild
from basisprune.deploy.bundle.tensors import assign_tensors, collect_tensors
from basisprune.deploy.folded import FoldedModel, traced, untraced
from basisprune.errors import BundleError, ConfigError, ModelError
from basisprune.torchkit.running import mode
from basisprune.transfer.backbones import build_backbone
from basisprune.transfer.model import ModelSource, TransferModel, transfer_model
from basisprune.types import BasisPlan, FilterPlan, InputSpec

Plan: TypeAlias = BasisPlan | FilterPlan

_PLANS: dict[str, type[BasisPlan] | type[FilterPlan]] = {"basis": BasisPlan, "filters": FilterPlan}
_FINGERPRINT = 64
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Bundle:
    """A saved network in eval mode, and what is known of it."""

    model: nn.Module
    input_shape: tuple[int, ...]
    input_spec: InputSpec | None = None
    classes: tuple[str, ...] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[Plan, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    classes: Sequence[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    plans: Sequence[Plan] = (),
    factory: str | None = None,
    input_shape: Sequence[int] | None = None,
) -> Path:
    """The folder, which now holds the network as it is: dense, decomposed, pruned or folded.

    A network from `transfer_model` knows how to build its architecture anew from a timm name or
    `"package.module:factory"`; so does one of nothing but layers of torch.nn. For any other, `factory` is the
    timm name or function that builds its backbone (or the whole network, if it is not from `transfer_model`).
    `classes` are by default those that the network has as an attribute. `input_shape` is that of one input, for
    networks without an `input_spec`. `metrics` is anything that JSON can hold.

    What was written is loaded and compared, bit for bit, before it takes the place of `folder`, which may be
    an older bundle, empty or not there. Raises BundleError or LayerError, and leaves the folder as it was, if
    the network cannot be saved. The network is not changed.
    """
    spec, shape = getattr(model, "input_spec", None), _input_shape(model, input_shape)
    classes = getattr(model, "classes", None) if classes is None else classes
    if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers())):
        model = copy.deepcopy(model).cpu()  # comparing bit for bit needs one device for all
    output = _run(model, _fixed_input(model, shape))
    _check_classes(classes, output)
    architecture = _architecture(model, factory)
    fresh = _fresh(architecture, spec)
    stored = untraced(model, copy.deepcopy(fresh)) if isinstance(model, FoldedModel) else model
    tensors, about_tensors = collect_tensors(stored, fresh)
    config = {
        "architecture": architecture,
        "structure": describe(stored, fresh),
        "tensors": about_tensors,
        "input": {"shape": list(shape), "spec": asdict(spec) if isinstance(spec, InputSpec) else None},
        "classes": None if classes is None else list(classes),
        "metrics": dict(metrics or {}),
        "versions": _versions(),
        "fingerprint": _fingerprint(output),
    }
    files = {TENSORS: save(tensors, {"format": "pt"}), PLANS: _plans_text(plans), CARD: model_card(config).encode()}
    return write_folder(Path(folder), config, files, lambda new: _compare(model, load_bundle(new).model, shape))


def from_pretrained(folder: str | Path, *, factory: str | None = None, revision: str | None = None) -> nn.Module:
    """The network in a folder that `save_pretrained` wrote, in eval mode; see `load_bundle` for all else.

    `folder` may be the id of a model on the Hugging Face hub, as `"owner/name"`, with its `revision`.
    """
    return load_bundle(folder, factory=factory, revision=revision).model


def load_bundle(folder: str | Path, *, factory: str | None = None, revision: str | None = None) -> Bundle:
    """The network in the folder, or on the hub, with its classes, preprocessing, metrics and plans.

    Nothing is unpickled, and every byte, tensor and the output are checked. The architecture is built by timm
    or by the function that the bundle names, which must be importable; `factory` takes its place, and must be
    given for a bundle from the hub, since calling a function by name means to trust it. Raises BundleError for
    a bundle that is missing, damaged, tampered with, newer than this package, or of another architecture.
    """
    path, is_remote = fetch(folder, revision)
    config, files = read_folder(path)
    try:
        architecture = dict(config["architecture"])
        backbone = architecture["backbone"] = factory or architecture["backbone"]
        if is_remote and factory is None and backbone is not None and ":" in backbone:
            raise BundleError(f"{folder}: it is built by {backbone!r}; if you trust that, pass factory={backbone!r}")
        spec = config["input"]["spec"]
        spec = None if spec is None else InputSpec(**{name: _as_tuple(value) for name, value in spec.items()})
        model = rebuild(config["structure"], _fresh(architecture, spec))
        assign_tensors(model, files[TENSORS], config["tensors"])
        classes = None if config["classes"] is None else tuple(config["classes"])
        model = _finished(model, architecture, spec, classes)
        bundle = Bundle(
            model=model.eval(),
            input_shape=tuple(config["input"]["shape"]),
            input_spec=spec,
            classes=classes,
            metrics=config["metrics"],
            plans=tuple(_plan(entry) for entry in json.loads(files[PLANS])),
            versions=config["versions"],
        )
        _check_fingerprint(bundle, config["fingerprint"])
    except BundleError as error:
        raise error if str(error).startswith(str(folder)) else BundleError(f"{folder}: {error}") from error
    except ModelError as error:
        raise BundleError(f"{folder}: its architecture cannot be built: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise BundleError(f"{folder}: does not make sense ({type(error).__name__}: {error}); fetch it again") from error
    return bundle


def push_to_hub(
    bundle: str | Path | nn.Module,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a basisprune bundle",
    **saving: Any,
) -> str:
    """The address of the commit on the hub that holds the bundle: a folder that `save_pretrained` wrote, or a network.

    A network is saved with `saving`, the arguments of `save_pretrained`; a folder is loaded once, to be sure
    that others can.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise ConfigError.of("push_to_hub", [f"repo_id: {repo_id!r} given; write 'owner/name'"])
    with TemporaryDirectory() as scratch:
        if isinstance(bundle, nn.Module):
            folder = save_pretrained(bundle, Path(scratch) / "bundle", **saving)
        else:
            if saving:
                raise ConfigError.of("push_to_hub", [f"{sorted(saving)}: are for a network, and a folder was given"])
            folder = Path(bundle)
            load_bundle(folder)
        commit: Any = HubFolder(folder).push_to_hub(repo_id, private=private, token=token, commit_message=message)
    return str(commit.commit_url)


def _architecture(model: nn.Module, factory: str | None) -> dict[str, Any]:
    """How to build the network anew, but for its structure; `insert_norm` is None if not by `transfer_model`."""
    source, is_folded = getattr(model, "source", None), isinstance(model, FoldedModel)
    if isinstance(model, GraphModule) and not is_folded:
        raise BundleError(
            "a torch.fx graph is code, which no bundle holds; save what fold made of a network of transfer_model, "
            "as fold returned it"
        )
    if not isinstance(source, ModelSource):
        return {"backbone": factory, "insert_norm": None, "traced": False}
    return {"backbone": factory or source.backbone, "insert_norm": source.insert_norm, "traced": is_folded}


def _fresh(architecture: Mapping[str, Any], spec: object) -> nn.Module | None:
    """The architecture with random weights, or None where the structure says all."""
    backbone, insert_norm = architecture["backbone"], architecture["insert_norm"]
    if backbone is None:
        return None
    with torch.random.fork_rng():
        if insert_norm is None:
            return build_backbone(backbone)
        known = spec if isinstance(spec, InputSpec) else None
        return transfer_model(backbone, 1, input_spec=known, insert_norm=insert_norm)


def _finished(
    model: nn.Module, architecture: Mapping[str, Any], spec: InputSpec | None, classes: tuple[str, ...] | None
) -> nn.Module:
    """The network with what it knows of itself, or as a graph if it was one."""
    known: dict[str, Any] = {"input_spec": spec, "classes": classes}
    if isinstance(model, TransferModel):
        known["source"] = ModelSource(architecture["backbone"], bool(architecture["insert_norm"]))
    for name, value in known.items():
        if value is not None:
            setattr(model, name, value)
    return traced("", model) if isinstance(model, TransferModel) and architecture["traced"] else model


def _input_shape(model: nn.Module, given: Sequence[int] | None) -> tuple[int, ...]:
    spec = getattr(model, "input_spec", None)
    if given is not None:
        return tuple(given)
    if not isinstance(spec, InputSpec):
        raise ConfigError.of(
            "save_pretrained",
            [f"input_shape: {type(model).__name__} does not know it; pass that of one input, such as (3, 224, 224)"],
        )
    return spec.shape


def _check_classes(classes: Sequence[str] | None, output: Tensor) -> None:
    if classes is not None and (len(classes) != output.shape[-1] or not all(isinstance(name, str) for name in classes)):
        raise ConfigError.of(
            "save_pretrained",
            [f"classes: {list(classes)[:5]} ... ({len(classes)}) given, {output.shape[-1]} names are needed"],
        )


def _fixed_input(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """One input in [-1, 1] that looks random and is the same on every machine and in every version."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    steps = torch.arange(math.prod(shape), dtype=torch.float64) * _GOLDEN % 1
    return (2 * steps - 1).reshape(1, *shape).to(like.dtype)


def _run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad(), mode(model, training=False):
        try:
            output = model(images)
        except Exception as error:
            raise BundleError(
                f"the network does not run on an input of shape {tuple(images.shape)}: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(output, Tensor) or not bool(output.isfinite().all()):
        what = "values that are not finite" if isinstance(output, Tensor) else type(output).__name__
        raise BundleError(f"the network puts out {what}; one tensor of finite numbers is needed")
    return output


def _fingerprint(output: Tensor) -> dict[str, Any]:
    values = output.double().flatten()
    return {"shape": list(output.shape), "values": values[:_FINGERPRINT].tolist(), "norm": values.norm().item()}


def _check_fingerprint(bundle: Bundle, wanted: Mapping[str, Any]) -> None:
    """Raises BundleError unless the network puts out what it did when it was saved, but for rounding."""
    output = _run(bundle.model, _fixed_input(bundle.model, bundle.input_shape))
    found = _fingerprint(output)
    coarse = torch.finfo(output.dtype).bits < 32
    tolerance = (5e-2 if coarse else 2e-3) * wanted["norm"] / math.sqrt(max(1, output.numel())) + 1e-6
    pairs = zip((*found["values"], found["norm"]), (*wanted["values"], wanted["norm"]), strict=True)
    limits = [tolerance] * len(found["values"]) + [tolerance * math.sqrt(max(1, output.numel()))]
    if found["shape"] == wanted["shape"] and all(abs(a - b) <= t for (a, b), t in zip(pairs, limits, strict=True)):
        return
    saved, here = bundle.versions, _versions()
    others = ", ".join(
        f"{name} {saved.get(name)} then, {here[name]} now" for name in here if saved.get(name) != here[name]
    )
    raise BundleError(
        "the network does not put out what it did when it was saved; it was tampered with, or its architecture "
        f"is another one now ({others or 'all versions are the same'})"
    )


def _compare(model: nn.Module, loaded: nn.Module, shape: Sequence[int]) -> None:
    like = _fixed_input(model, shape)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)).to(like.dtype)
    if not torch.equal(_run(model, images), _run(loaded, images)):
        raise BundleError(
            "what was loaded does not put out what the network does, so nothing was saved; it keeps something in an "
            "attribute that is no number, text or tensor: build that in a factory='package.module:function'"
        )


def _versions() -> dict[str, str]:
    packages = ("basisprune", "torch", "timm", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _plans_text(plans: Sequence[Plan]) -> bytes:
    kinds = {cls: kind for kind, cls in _PLANS.items()}
    if foreign := [type(plan).__name__ for plan in plans if type(plan) not in kinds]:
        raise ConfigError.of("save_pretrained", [f"plans: {foreign[0]} given; allowed are BasisPlan and FilterPlan"])
    entries = (f'{{"kind": "{kinds[type(plan)]}", "plan": {plan.to_json()}}}' for plan in plans)
    return f"[{', '.join(entries)}]".encode()


def _plan(entry: Mapping[str, Any]) -> Plan:
    return _PLANS[entry["kind"]].from_json(json.dumps(entry["plan"]))


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
