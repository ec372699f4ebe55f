"""A bundle's files, read and written; and the network in them, checked, without running anything that they hold."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import snapshot_download
from pydantic import JsonValue
from torch import Tensor, nn

from basisprune.deploy.bundle.config import Architecture, Config, Fingerprint, Plan, parse_config, parse_plans
from basisprune.deploy.bundle.limits import Bounded, RunGuard, memory_allowed, work_allowed
from basisprune.deploy.bundle.steps import from_steps
from basisprune.deploy.bundle.structure import assign_tensors, read_tensors, rebuild
from basisprune.deploy.comparing import fixed_input, run
from basisprune.deploy.graphs import FoldedModel, about, graph_model
from basisprune.deploy.tracing import trace
from basisprune.errors import BundleError, ModelError
from basisprune.files import current, digest, json_digest, open_file, parse_json, read_bytes, user_path, write_together
from basisprune.torchkit.surgery import named_tensors, refuse_hidden_names
from basisprune.transfer.backbones import build_backbone, is_elsewhere
from basisprune.transfer.model import KeptModel, ModelSource, TransferModel, transfer_model
from basisprune.types import InputSpec

FORMAT = 3  # 1 had no networks that stand alone, 2 said nothing to timm
CONFIG, TENSORS, PLANS, CARD = "config.json", "model.safetensors", "plans.json", "README.md"
FILES = (CONFIG, TENSORS, PLANS)  # those that are read
NAMES = frozenset({*FILES, CARD})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MARK, _CARD_MARK = "basisprune_bundle", "library_name: basisprune"
_TIMM, _BUILT = ("architecture", "num_classes", "label_names", "pretrained_cfg"), "network"
_MOST = {CONFIG: 8 << 20, PLANS: 8 << 20, TENSORS: 4 << 30}  # bytes
_LISTED = 5
_DENSE = (",", ":")
_T = TypeVar("_T")
_BUILDING, _BUILDING_PER_BYTE = 512 << 20, 64  # bytes, and times what the file's tensors take
_BUILDING_OPERATIONS, _BUILDING_RUNS = 300_000, 8
_LARGE_INPUT = 1 << 20  # numbers
_VALUES = 64  # of the output that are kept to be compared


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
            f"{where}: is built by {builder!r}, which would be imported and run; if you trust the author of this "
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
    if architecture.builder is None or not architecture.is_timm:  # or it is trusted code
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


# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class Stored:
    """All that the files of a bundle say; every name and number in it was checked."""

    config: Config
    tensors: dict[str, Tensor]
    plans: tuple[Plan, ...]


def write_folder(folder: Path, config: Config, files: Mapping[str, bytes], check: Callable[[Path], object]) -> Path:
    """Write the config and the files into the folder, after `check` has seen them in a folder of their own.

    An older bundle is replaced in that moment and not before; files by other names stay. Raises BundleError for a
    folder that `check_folder` refuses.
    """
    check_folder(folder)
    sums = {name: digest(content) for name, content in files.items() if name != CARD}
    ours = asdict(config)
    full = {_MARK: FORMAT, **for_timm(config), _BUILT: ours.pop("architecture"), **ours, "files": sums}
    try:
        entries = {**full, "checksum": json_digest(full)}.items()
        lines = [
            f"{json.dumps(key)}: {json.dumps(value, separators=_DENSE, allow_nan=False)}" for key, value in entries
        ]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
    except (TypeError, ValueError) as error:
        raise BundleError(
            f"{folder}: its metrics or classes are no JSON ({error}); pass numbers, texts, lists"
        ) from error
    write_together(folder, {**files, CONFIG: text.encode()}, check)
    return folder


def read_folder(folder: Path) -> Stored:
    """Read the files of a bundle, every checksum compared.

    Raises BundleError that says which file is missing, damaged, newer than this package or not what it should be.
    """
    where = folder / CONFIG
    if not os.path.lexists(current(folder, CONFIG)):
        raise BundleError(f"{folder}: {_what_it_is(folder)}")
    content = {CONFIG: _read(folder, CONFIG)}
    try:
        said = parse_json(content[CONFIG])
    except ValueError as error:
        raise BundleError(f"{where}: is damaged, no JSON ({error}); fetch it again") from error
    if not isinstance(said, dict) or not isinstance(number := said.pop(_MARK, None), int):
        raise BundleError(f"{where}: is not that of a basisprune bundle; save one with save_pretrained")
    if number > FORMAT:
        raise BundleError(
            f"{folder}: format {number} is newer than {FORMAT}, which this version reads; update basisprune"
        )
    sums, checksum = said.get("files"), said.pop("checksum", None)
    if checksum != json_digest({_MARK: number, **said}):
        raise BundleError(f"{where}: is damaged or was changed, its checksum is wrong; fetch it again")
    for name in (TENSORS, PLANS):
        content[name] = _read(folder, name)
        if not isinstance(sums, dict) or digest(content[name]) != sums.get(name):
            raise BundleError(f"{folder / name}: is damaged or was changed, its checksum is wrong; fetch it again")
    del said["files"]
    if number > 2:
        for name in _TIMM:  # is for others
            said.pop(name, None)
        said["architecture"] = said.pop(_BUILT, None)
    return Stored(
        _named(where, parse_config, json.dumps(said).encode()),
        _named(folder / TENSORS, read_tensors, content[TENSORS]),
        _named(folder / PLANS, parse_plans, content[PLANS]),
    )


def for_timm(config: Config) -> dict[str, object]:
    """Return what timm reads of a config: where the network comes from, its classes, and how images are prepared.

    timm builds the whole architecture of that name, not what pruning has left of it.
    """
    spec, count = config.input.spec, config.fingerprint.shape[1:2]
    prepared: dict[str, object] = {"input_size": list(config.input.shape), "num_classes": sum(count)}
    if spec is not None:
        prepared |= {"mean": list(spec.mean), "std": list(spec.std), "interpolation": spec.interpolation}
        prepared |= {"crop_pct": 1.0, "crop_mode": "squash"}
    values = (config.architecture.backbone or "", sum(count), config.classes, prepared)
    return dict(zip(_TIMM, values, strict=True))


def _what_it_is(folder: Path) -> str:
    """What a folder is that is no bundle, and what to do about it."""
    if holds_bundle(folder / "model"):
        return f"is the folder of a run; pass the bundle in it, {folder / 'model'}"
    if (folder / "config.yaml").is_file():
        return "is the folder of a run that has not written its model yet; run its command again to finish it"
    held = sorted(entry.name for entry in folder.iterdir())[:_LISTED] if folder.is_dir() else []
    holds = f"holds {', '.join(held)}" if held else "is empty"
    return f"is neither a bundle nor a run: it {holds}; pass a folder that save_pretrained, compress or train wrote"


def holds_bundle(folder: Path) -> bool:
    """Whether the folder holds a bundle, sound or not: its config says so, or its card where the config is damaged."""
    is_there = os.path.lexists(current(folder, CONFIG))
    return is_there and any(mark in _start(folder, name) for name, mark in ((CONFIG, _MARK), (CARD, _CARD_MARK)))


def _start(folder: Path, name: str) -> str:
    """The first lines of a file, empty if it cannot be read."""
    try:
        with open_file(current(folder, name)) as file:
            return file.read(4096).decode(errors="replace")
    except OSError:
        return ""


def check_folder(folder: Path) -> None:
    """Raise BundleError unless a bundle can be written there, and nothing of anybody else would be lost.

    The folder may be missing, empty, or hold a bundle or files by other names, which stay.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BundleError(f"{folder}: is a file or a link; name a folder that is new, empty or a bundle")
    held = sorted(name for name in NAMES if os.path.lexists(folder / name))
    if held and not holds_bundle(folder):
        raise BundleError(f"{folder}: is not a bundle, and saving would replace its {held[0]}; name another folder")
    if odd := [name for name in held if (folder / name).is_symlink() or not (folder / name).is_file()]:
        raise BundleError(f"{folder / odd[0]}: is a link or a folder, which saving would replace; move it away")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BundleError(f"{folder}: {there} is not a folder that one may write into; name another folder")


def _named(path: Path, parse: Callable[[bytes], _T], content: bytes) -> _T:
    """What the file says; an error starts with its name."""
    try:
        return parse(content)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from error


def _read(folder: Path, name: str) -> bytes:
    try:
        try:
            return read_bytes(current(folder, name), most=_MOST[name])
        except FileNotFoundError:
            return read_bytes(folder / name, most=_MOST[name])  # a writer has just put it in its place
    except OSError as error:
        raise BundleError(
            f"{folder / name}: cannot be read ({error.strerror or error}); a bundle needs this file"
        ) from error
