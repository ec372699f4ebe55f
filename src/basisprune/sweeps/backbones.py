"""Which backbones a portfolio can start from: those whose weights are on this machine or can be fetched."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
import timm
import torch
from huggingface_hub import constants
from timm.models import get_pretrained_cfg

from basisprune.callback import Callback
from basisprune.data.load import Source
from basisprune.errors import BasisPruneError, ConfigError, ModelError, nearest
from basisprune.runs.load import AnyModel, Job, prepare_job
from basisprune.runs.settings import RunConfig
from basisprune.sweeps.running import Backbone
from basisprune.transfer.backbones import build_backbone
from basisprune.types import JsonValue

AUTO = "auto"
PORTFOLIO = (
    "mobilenetv3_small_100",
    "mobilenetv3_large_100",
    "tf_efficientnet_lite0",
    "efficientnet_b0",
    "resnet18",
    "resnet50",
    "regnety_016",
    "densenet121",
    "convnext_tiny",
)
"""What "auto" tries, from small to large: 2.5 to 29 million parameters."""

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
_SECONDS = 10.0  # for the hub to answer at all


@dataclass(frozen=True)
class BackboneSource:
    """Where backbones come from: a folder with files of weights, and models given in Python under these names."""

    weights: Path | None = None
    pretrained: bool = True
    in_memory: Collection[str] = ()


@dataclass(frozen=True)
class Available(JsonValue):
    """The backbones that can be used, and the reasons why others cannot, by name."""

    backbones: tuple[Backbone, ...]
    missing: dict[str, str]


def available(names: Sequence[str], source: BackboneSource, callback: Callback) -> Available:
    """Return the backbones that can be used; fetch weights that are neither in the folder of weights nor in a cache.

    A hub that does not answer is asked once, for a few seconds. Raises ModelError if no backbone can be used.
    """
    found, missing = on_this_machine(names, source), dict[str, str]()
    unreachable = _why_unreachable() if None in found.values() else ""
    for name in [name for name, backbone in found.items() if backbone is None]:
        try:
            if unreachable:
                raise ModelError(f"its weights are not on this machine, and {unreachable}")
            callback.log(f"fetching the weights of {name}")
            build_backbone(name, pretrained=True)
            found[name] = Backbone(name, cached=True)
        except BasisPruneError as error:
            missing[name] = str(error)
            callback.log(f"{name} is not available: {error}")
    backbones = tuple(filter(None, found.values()))
    if not backbones:
        raise ModelError.of(
            "no backbone of the portfolio is available; connect to the hub, or pass a folder with files such as "
            "resnet50.safetensors (--weights-folder)",
            [f"{name}: {why}" for name, why in missing.items()],
        )
    return Available(backbones, missing)


def on_this_machine(names: Sequence[str], source: BackboneSource) -> dict[str, Backbone | None]:
    """Return the backbones of these names, None for those whose weights must be fetched."""
    refuse_unknown(names, source.in_memory)
    found: dict[str, Backbone | None] = {}
    for name in names:
        if name in source.in_memory or not is_timm(name) or not source.pretrained:
            found[name] = Backbone(name)
        elif (file := _local_file(name, source.weights)) is not None:
            found[name] = Backbone(name, weights=str(file))
        else:
            found[name] = Backbone(name, cached=True) if is_cached(name) else None
    return found


def refuse_unknown(names: Sequence[str], in_memory: Collection[str] = ()) -> None:
    """Raise ConfigError for duplicates and for names that are neither timm's, nor factories, nor folders."""
    faults = [f"{name!r} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    known = (name for name in names if name in in_memory or ":" in name or timm.is_model(name) or Path(name).is_dir())
    if unknown := set(names) - set(known):
        models = timm.list_models()
        hints = {name: nearest(name.partition(".")[0], models, most=3) for name in names if name in unknown}
        faults += [f"timm has no model {name!r}.{hint}" for name, hint in hints.items()]
    if not names:
        faults.append(f"none given; pass names of timm models, or {AUTO!r}")
    if faults:
        raise ConfigError.of("models", faults)


def is_timm(name: str) -> bool:
    """Whether the name is one of timm's, and neither a factory nor a folder."""
    return ":" not in name and timm.is_model(name)


def is_cached(name: str) -> bool:
    """Whether the weights that timm would load for the name are on this machine."""
    known = get_pretrained_cfg(name)
    if known is None:
        return False
    if known.hf_hub_id:
        files = (known.hf_hub_filename,) if known.hf_hub_filename else _HUB_FILES
        repository = known.hf_hub_id.partition("@")[0]
        return any(isinstance(huggingface_hub.try_to_load_from_cache(repository, file), str) for file in files)
    if known.url:
        return Path(torch.hub.get_dir(), "checkpoints", str(known.url).rpartition("/")[2]).is_file()
    return known.file is not None and Path(str(known.file)).is_file()


def common_size(names: Sequence[str], side: int | None) -> int | None:
    """Return one height and width for all backbones: `side`, or what most of them were made for, the smaller of two."""
    if side is not None:
        return side
    known = [get_pretrained_cfg(name) for name in names if is_timm(name)]
    sides = [config.input_size[-1] for config in known if config is not None]
    return min(set(sides), key=lambda one: (-sides.count(one), one)) if sides else None


def start_from(
    backbone: Backbone, model: AnyModel | None, data: Source, config: RunConfig, folder: Path, callback: Callback
) -> Job:
    """Prepare the job of a run that starts from the backbone, or from a `model` given in Python under its name."""
    given = config if backbone.weights is None else replace(config, weights=backbone.weights)
    with _offline() if backbone.cached else nullcontext():
        job = prepare_job(model or backbone.name, data, given, output=folder, callback=callback)
    return replace(job, model=backbone.name, config=config)


@contextmanager
def _offline() -> Iterator[None]:
    """Use the hub's cache without asking the hub."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _why_unreachable() -> str:
    """Explain in a clause why the hub cannot be asked; return an empty text if it answers."""
    if constants.is_offline_mode():
        return "the hub is switched off (HF_HUB_OFFLINE)"
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):
            huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_SECONDS / 2)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # a silent name server ignores the timeout
    thread.start()
    thread.join(_SECONDS)
    return "" if answered.is_set() else "the hub does not answer"


def _local_file(name: str, folder: Path | None) -> Path | None:
    """Find the file of weights for the name, with or without its tag (resnet50.a1_in1k, resnet50)."""
    stems = (name, name.partition(".")[0])
    paths = [folder / f"{stem}{end}" for stem in stems for end in _SUFFIXES] if folder else []
    return next(filter(Path.is_file, paths), None)
