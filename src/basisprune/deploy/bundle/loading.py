"""A folder (or the hub) -> the network in it, checked, without running anything that the folder holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from basisprune.deploy.bundle.arguments import check_loading
from basisprune.deploy.bundle.config import Architecture, Config, Plan, Step
from basisprune.deploy.bundle.files import Stored, read_folder
from basisprune.deploy.bundle.graph import from_steps
from basisprune.deploy.bundle.hub import fetch
from basisprune.deploy.bundle.limits import Bounded, RunGuard, memory_allowed, work_allowed
from basisprune.deploy.bundle.running import check_fingerprint, fixed_input, run
from basisprune.deploy.bundle.structure import rebuild
from basisprune.deploy.bundle.tensors import assign_tensors
from basisprune.deploy.folded import FoldedModel, about, folded, traced
from basisprune.errors import BundleError, ModelError
from basisprune.torchkit.surgery import named_tensors, refuse_hidden_names
from basisprune.transfer.backbones import build_backbone, is_elsewhere
from basisprune.transfer.kept import KeptModel
from basisprune.transfer.model import ModelSource, TransferModel, transfer_model
from basisprune.types import InputSpec

_BUILDING, _BUILDING_PER_BYTE = 512 << 20, 64  # bytes, and times what the file's tensors take
_BUILDING_OPERATIONS, _BUILDING_RUNS = 300_000, 8
_LARGE_INPUT = 1 << 20  # numbers


@dataclass(frozen=True)
class Bundle:
    """A saved network in eval mode, and what is known of it."""

    model: nn.Module
    input_shape: tuple[int, ...]
    input_spec: InputSpec | None = None
    classes: tuple[str, ...] | None = None
    metrics: Mapping[str, JsonValue] = field(default_factory=dict)
    plans: tuple[Plan, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def from_pretrained(
    folder: str | Path, *, factory: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """The network in a folder that `save_pretrained` wrote, in eval mode; see `load_bundle` for all else.

    `folder` may be the id of a model on the Hugging Face hub, as `"owner/name"`, with its `revision`.
    """
    return load_bundle(folder, factory=factory, revision=revision, trust_remote_code=trust_remote_code).model


def load_bundle(
    folder: str | Path, *, factory: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> Bundle:
    """The network in the folder, or on the hub, with its classes, preprocessing, metrics and plans.

    Nothing that the bundle holds is run, and every byte, name, tensor and the output are checked. A network that is
    not built by timm and has not been folded may need the function that made its backbone: that one is imported and
    called only with `trust_remote_code=True`, or if you name it yourself as `factory`, which takes its place. Raises
    BundleError for a bundle that is missing, damaged, tampered with, newer than this package, of another architecture
    or that asks for code; ConfigError for arguments of wrong types.
    """
    check_loading(factory, revision, trust_remote_code)
    path = fetch(folder, revision)
    return assemble(read_folder(path), str(folder), factory=factory, trust_remote_code=trust_remote_code)


def assemble(stored: Stored, where: str, *, factory: str | None = None, trust_remote_code: bool = False) -> Bundle:
    """The bundle that the files called `where` describe."""
    config = stored.config
    architecture = config.architecture
    if factory is not None and architecture.builder is not None:
        architecture = replace(architecture, backbone=factory)
    elif architecture.builder is not None and is_elsewhere(architecture.builder):
        raise BundleError(
            f"{where}: is built by {architecture.builder!r}, which lies in another folder or on the hub; a bundle may "
            "only name networks of timm and torchvision; pass a function of your own as factory="
        )
    elif architecture.builder is not None and not architecture.is_timm and not trust_remote_code:
        raise BundleError(
            f"{where}: is built by {architecture.builder!r}, which would be imported and run; if you trust whoever "
            "made this bundle, pass trust_remote_code=True (--trust-code on the command line), or a function of your "
            "own as factory=; a folded network does not need it"
        )
    classes = None if config.classes is None else tuple(config.classes)
    is_own = factory is not None and architecture.backbone == factory  # else it is what the file says
    is_trusted = is_own or trust_remote_code or architecture.is_timm
    try:
        model = _network(stored, architecture, is_trusted=is_trusted)
        refuse_hidden_names(model)
        output = _first_output(model, config.input.shape)
        check_fingerprint(output, config.fingerprint, config.versions)
        _check_classes(classes, output)
    except BundleError as error:
        raise BundleError(f"{where}: {error}") from error
    except ModelError as error:
        raise BundleError(f"{where}: its architecture cannot be built: {error}") from error
    except (Exception, SystemExit) as error:
        raise BundleError(f"{where}: does not make sense ({type(error).__name__}: {error}); fetch it again") from error
    known = config.input
    return Bundle(model, known.shape, known.spec, classes, config.metrics, stored.plans, config.versions)


def fresh_network(architecture: Architecture, spec: InputSpec | None) -> nn.Module | None:
    """The architecture with random weights, or None where the structure says all."""
    if architecture.builder is None:
        return None
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU; the GPUs are left alone
        if architecture.insert_norm is None:
            network = build_backbone(architecture.builder, size=None if spec is None else spec.image_size)
            # A network that kept its head is the only part of what was traced.
            return KeptModel(network, spec, 0) if architecture.traced and spec is not None else network
        return transfer_model(architecture.builder, 1, input_spec=spec, insert_norm=architecture.insert_norm)


def _network(stored: Stored, architecture: Architecture, *, is_trusted: bool) -> nn.Module:
    """The network in eval mode, with what it knows of itself, as a graph if it was one."""
    config, spec = stored.config, stored.config.input.spec
    with _building(stored, architecture):
        fresh = fresh_network(architecture, spec)
    model = rebuild(config.structure, fresh)
    assign_tensors(model, stored.tensors, config.tensors)
    source = ModelSource(architecture.backbone, architecture.insert_norm, is_trusted=is_trusted)
    if architecture.graph is not None:
        return _from_graph(model, architecture.graph, config, source)
    known = {"input_spec": spec, "classes": None if config.classes is None else tuple(config.classes)}
    if isinstance(model, TransferModel | KeptModel):
        model.source = source
    for name, value in known.items():
        if value is not None:
            setattr(model, name, value)
    is_traced = isinstance(model, TransferModel | KeptModel) and architecture.traced
    model.eval()
    with Bounded():
        return traced("", model) if is_traced else model  # type: ignore[arg-type]


def _building(stored: Stored, architecture: Architecture) -> AbstractContextManager[object]:
    """The context to build a network in that is not much larger than what the file holds of it: pruning leaves a part.

    Its size is found without memory, where it can be built like that; otherwise, and for large inputs, all is counted.
    """
    numbers, spec = math.prod(stored.config.input.shape), stored.config.input.spec
    held = sum(tensor.nbytes for tensor in stored.tensors.values())
    memory = _BUILDING + _BUILDING_PER_BYTE * held
    if architecture.builder is None or not architecture.is_timm:  # or it is somebody's code, who is trusted
        return nullcontext()
    try:
        with torch.device("meta"):
            size = None if spec is None else spec.image_size
            needed = sum(tensor.nbytes for _, tensor in named_tensors(build_backbone(architecture.builder, size=size)))
    except ModelError:
        needed = None
    if needed is None or numbers > _LARGE_INPUT:
        work = _BUILDING_RUNS * work_allowed(_BUILDING_PER_BYTE * held, numbers)
        return Bounded(_BUILDING_OPERATIONS, work=work, memory=memory)
    if needed > memory:
        raise BundleError(
            f"{architecture.builder} needs {needed:,} bytes of memory, and the file holds {held:,}; "
            f"at most {memory:,} are allowed for it"
        )
    return nullcontext()


def _from_graph(parts: nn.Module, steps: list[Step], config: Config, source: ModelSource) -> nn.Module:
    if not config.architecture.alone:
        raise BundleError("a graph stands alone")
    model = folded(parts, from_steps(steps, parts), about(config.input.spec, source, config.classes))
    model.guard = RunGuard(_weights(model), config.input.shape)
    return model.eval()


def _first_output(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """What the network outputs for the fixed input, while its costs are counted; it must leave its weights alone."""
    held = [tensor for _, tensor in named_tensors(model)]
    before = [tensor._version for tensor in held]
    size = _weights(model), math.prod(shape)
    with Bounded(work=work_allowed(*size), memory=memory_allowed(*size)):
        output = run(model, fixed_input(model, shape))
    if isinstance(model, FoldedModel) and before != [tensor._version for tensor in held]:
        raise BundleError("its graph changes its own weights")
    return output


def _weights(model: nn.Module) -> int:
    return sum(tensor.numel() for _, tensor in named_tensors(model))


def _check_classes(classes: tuple[str, ...] | None, output: Tensor) -> None:
    if classes is not None and (output.dim() < 2 or output.shape[-1] != len(classes)):
        raise BundleError(f"it names {len(classes)} classes and outputs {tuple(output.shape)[1:]} numbers")
