"""A folder (or the hub) -> the network in it, checked, without running anything that the folder holds."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from pydantic import JsonValue
from torch import Tensor, nn

from basisprune.deploy.bundle.config import Architecture, Config, Fingerprint, Plan
from basisprune.deploy.bundle.files import HUB_ID, NAMES, Stored, read_folder
from basisprune.deploy.bundle.limits import Bounded, RunGuard, memory_allowed, work_allowed
from basisprune.deploy.bundle.steps import from_steps
from basisprune.deploy.bundle.structure import assign_tensors, rebuild
from basisprune.deploy.graphs import FoldedModel, about, graph_model, trace
from basisprune.errors import BundleError, ModelError
from basisprune.files import user_path
from basisprune.torchkit.running import mode, tensors_in
from basisprune.torchkit.surgery import named_tensors, refuse_hidden_names
from basisprune.transfer.backbones import build_backbone, is_elsewhere
from basisprune.transfer.kept import KeptModel
from basisprune.transfer.model import ModelSource, TransferModel, transfer_model
from basisprune.types import InputSpec

_BUILDING, _BUILDING_PER_BYTE = 512 << 20, 64  # bytes, and times what the file's tensors take
_BUILDING_OPERATIONS, _BUILDING_RUNS = 300_000, 8
_LARGE_INPUT = 1 << 20  # numbers
_VALUES = 64  # of the output that are kept to be compared
_GOLDEN = (math.sqrt(5) - 1) / 2


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
    """Load the network, in eval mode, that `save_pretrained` wrote; see `load_bundle` for all else.

    Args:
        folder: The folder, or the id of a model on the Hugging Face hub, as `"owner/name"`.
        factory: A function of yours, as `"package.module:function"`, that builds the backbone.
        revision: Which revision of the model on the hub.
        trust_remote_code: Whether a function that the bundle names may be imported and called.

    Raises:
        BundleError: The bundle is missing, damaged, tampered with, newer than this package, of another architecture,
            or asks for code.
    """
    return load_bundle(folder, factory=factory, revision=revision, trust_remote_code=trust_remote_code).model


def load_bundle(
    folder: str | Path, *, factory: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> Bundle:
    """Load a network with its classes, preprocessing, metrics and plans; arguments and errors as `from_pretrained`.

    Nothing that the bundle holds is run, and every byte, name, tensor and the output are checked. A network that is
    not built by timm and has not been folded may need the function that made its backbone: that one is imported and
    called only with `trust_remote_code=True`, or if you name it yourself as `factory`, which takes its place.
    """
    return assemble(read_folder(_fetch(folder, revision)), str(folder), factory, trust_remote_code is True)


def _fetch(folder: str | Path, revision: str | None) -> Path:
    path = user_path(folder, "load_bundle")
    if path.is_dir():
        return path
    if not isinstance(folder, str) or not HUB_ID.fullmatch(folder):
        raise BundleError(f"{folder}: no such folder; pass one that save_pretrained wrote, or a hub id 'owner/name'")
    try:
        return Path(snapshot_download(folder, revision=revision, allow_patterns=sorted(NAMES)))
    except Exception as error:  # the network fails in many ways
        raise BundleError(
            f"{folder}: no such folder, and the hub does not give it ({type(error).__name__}: {error})"
        ) from error


def assemble(stored: Stored, where: str, factory: str | None = None, trust_remote_code: bool = False) -> Bundle:
    """Return the bundle that the files called `where` describe."""
    config, known = stored.config, stored.config.input
    architecture = config.architecture
    builder = architecture.builder
    if builder is not None and factory is not None:
        architecture = replace(architecture, backbone=factory)
    elif builder is not None and is_elsewhere(builder):
        raise BundleError(
            f"{where}: is built by {builder!r}, which lies in another folder or on the hub; a bundle may only name "
            "networks of timm and torchvision; pass a function of your own as factory="
        )
    elif builder is not None and not architecture.is_timm and not trust_remote_code:
        raise BundleError(
            f"{where}: is built by {builder!r}, which would be imported and run; if you trust whoever made this "
            "bundle, pass trust_remote_code=True (--trust-code on the command line), or a function of your own as "
            "factory=; a folded network does not need it"
        )
    is_named = factory is not None and architecture.backbone == factory  # by the caller, and not by the file
    classes = None if config.classes is None else tuple(config.classes)
    try:
        model = _network(stored, architecture, is_trusted=is_named or trust_remote_code or architecture.is_timm)
        refuse_hidden_names(model)
        output = _first_output(model, known.shape)
        _check_fingerprint(output, config)
        if classes is not None and (output.dim() < 2 or output.shape[-1] != len(classes)):
            raise BundleError(f"it names {len(classes)} classes and outputs {tuple(output.shape)[1:]} numbers")
    except BundleError as error:
        raise BundleError(f"{where}: {error}") from error
    except ModelError as error:
        raise BundleError(f"{where}: its architecture cannot be built: {error}") from error
    except (Exception, SystemExit) as error:
        raise BundleError(f"{where}: does not make sense ({type(error).__name__}: {error}); fetch it again") from error
    return Bundle(model, known.shape, known.spec, classes, config.metrics, stored.plans, config.versions)


def fresh_network(architecture: Architecture, spec: InputSpec | None) -> nn.Module | None:
    """Build the architecture with random weights; None where the structure says all."""
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
        if not architecture.alone:
            raise BundleError("a graph stands alone")
        graph = graph_model(model, from_steps(architecture.graph, model), about(spec, source, config.classes))
        graph.guard = RunGuard(_weights(graph), config.input.shape)
        return graph.eval()
    model.eval()
    if spec is not None:
        model.input_spec = spec  # type: ignore[assignment]
    if config.classes is not None:
        model.classes = tuple(config.classes)  # type: ignore[assignment]
    if not isinstance(model, TransferModel | KeptModel):
        return model
    model.source = source
    with Bounded():
        return trace("", model) if architecture.traced else model


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


# ------------------------------------------------------------------------ a network on one fixed input


def fixed_input(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return one input in [-1, 1] that looks random and is the same on every machine and in every version."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    steps = torch.arange(math.prod(shape), dtype=torch.float64) * _GOLDEN % 1
    return (2 * steps - 1).reshape(1, *shape).to(like.dtype)


def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return what the network outputs in eval mode: one tensor as it is; of several, all numbers in a row.

    Raises BundleError unless these are finite numbers.
    """
    with torch.no_grad(), mode(model, training=False):
        try:
            output = model(images)
        except BundleError:
            raise
        except (Exception, SystemExit) as error:
            raise BundleError(
                f"the network does not run on an input of shape {tuple(images.shape)}: {type(error).__name__}: {error}"
            ) from error
    tensors = list(tensors_in(output))
    if not tensors or not all(bool(tensor.isfinite().all()) for tensor in tensors):
        what = "values that are not finite" if tensors else f"{type(output).__name__} without tensors"
        raise BundleError(f"the network outputs {what}; tensors of finite numbers are needed")
    if isinstance(output, Tensor):
        return output
    return torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors])


def fingerprint(output: Tensor) -> Fingerprint:
    """Return what is kept of the output, to be compared when the network is loaded."""
    values = output.double().flatten()
    return Fingerprint(list(output.shape), values[:_VALUES].tolist(), values.norm().item())


def _check_fingerprint(output: Tensor, config: Config) -> None:
    """Raise BundleError unless the network outputs what it did when it was saved, but for rounding."""
    wanted, versions = config.fingerprint, config.versions
    found, root = fingerprint(output), math.sqrt(max(1, output.numel()))
    coarse = output.is_floating_point() and torch.finfo(output.dtype).bits < 32
    tolerance = (5e-2 if coarse else 2e-3) * found.norm / root + 1e-6
    if (
        found.shape == wanted.shape
        and len(found.values) == len(wanted.values)
        and all(abs(a - b) <= tolerance for a, b in zip(found.values, wanted.values, strict=True))
        and abs(found.norm - wanted.norm) <= tolerance * root
    ):
        return
    here = package_versions()
    others = ", ".join(
        f"{name} {versions.get(name)} then, {here[name]} now" for name in here if versions.get(name) != here[name]
    )
    raise BundleError(
        "the network does not output what it did when it was saved; it was tampered with, or its architecture "
        f"is another one now ({others or 'all versions are the same'})"
    )


def package_versions() -> dict[str, str]:
    """Return the versions of what a saved network depends on."""
    packages = ("basisprune", "torch", "timm", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
