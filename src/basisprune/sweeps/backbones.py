"""Which backbones a portfolio can start from: those whose weights are on this machine or can be fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
import timm
import torch
from huggingface_hub import constants
from timm.models import get_pretrained_cfg

from basisprune.data.load import Source
from basisprune.errors import BasisPruneError, ConfigError, ModelError, nearest
from basisprune.listener import Listener
from basisprune.runs.job import Job, ModelSource, prepare_job
from basisprune.runs.options import RunConfig
from basisprune.sweeps.cells import Backbone, slug
from basisprune.transfer.backbones import build_backbone
from basisprune.transfer.model import spec_of, transfer_model

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
class Available:
    """The backbones that can be had, and for the others why not, by name."""

    backbones: tuple[Backbone, ...]
    missing: dict[str, str]


def available(
    names: Sequence[str],
    root: Path,
    listener: Listener,
    *,
    weights: Path | None = None,
    pretrained: bool = True,
    given: Collection[str] = (),
) -> Available:
    """The backbones of these names that can be had, with folders under `root`; those `given` are there already.

    For a timm name, weights are taken from a file in the folder `weights` (`resnet50.safetensors`, or .pth, .pt, .bin),
    from the caches of the hub and of torch, or else from the hub. A hub that does not answer is asked once, for a few
    seconds. Raises ConfigError for names that are not known, and ModelError if no backbone can be had.
    """
    hub = _Hub()
    found: list[Backbone] = []
    missing: dict[str, str] = {}
    for name, backbone in at_hand(names, root, weights=weights, pretrained=pretrained, given=given).items():
        if backbone is not None:
            found.append(backbone)
        elif why := hub.fetch(name, listener):
            missing[name] = why
        else:
            found.append(Backbone(name, str(root / slug(name)), cached=True))
    for name, why in missing.items():
        listener.say(f"{name} could not be had: {why}")
    if not found:
        raise ModelError.of(
            "no backbone of the portfolio can be had; connect to the hub, or pass a folder with files such as "
            "resnet50.safetensors (--weights-folder)",
            [f"{name}: {why}" for name, why in missing.items()],
        )
    return Available(tuple(found), missing)


def at_hand(
    names: Sequence[str],
    root: Path,
    *,
    weights: Path | None = None,
    pretrained: bool = True,
    given: Collection[str] = (),
) -> dict[str, Backbone | None]:
    """The backbones of these names, None for those whose weights are to be fetched; raises as `available` does."""
    refuse_unknown(names, given)
    found: dict[str, Backbone | None] = {}
    for name in names:
        backbone = Backbone(name, str(root / slug(name)))
        if name in given or not is_timm(name) or not pretrained:
            found[name] = backbone
        elif (file := _local_file(name, weights)) is not None:
            found[name] = replace(backbone, weights=str(file))
        else:
            found[name] = replace(backbone, cached=True) if is_cached(name) else None
    return found


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


def common_size(backbones: Sequence[Backbone], side: int | None) -> int | None:
    """The height and width of the images for all backbones, so that they compare: the one given, or the most usual.

    That is what timm says of most of them, the smaller of two; None where timm knows none of them.
    """
    if side is not None:
        return side
    known = [get_pretrained_cfg(each.name) for each in backbones if is_timm(each.name)]
    sides = [config.input_size[-1] for config in known if config is not None]
    return min(set(sides), key=lambda one: (-sides.count(one), one)) if sides else None


def start_from(
    backbone: Backbone, model: ModelSource | None, data: Source, config: RunConfig, listener: Listener
) -> Job:
    """The job of a run that starts from the backbone, or from a model that was handed over under its name."""
    folder = Path(backbone.folder)
    with offline() if backbone.cached else nullcontext():
        if model is not None or backbone.weights is None:
            job = prepare_job(model or backbone.name, data, config, output=folder, listener=listener)
            return replace(job, model=backbone.name)
        plain = replace(config, pretrained=False)
        job = prepare_job(backbone.name, data, plain, output=folder, listener=listener)
    torch.manual_seed(config.seed)
    spec = spec_of(job.network)
    network = transfer_model(backbone.name, job.splits.num_classes, weights=backbone.weights, input_size=spec.size[0])
    network.input_spec = spec
    return replace(job, network=network, config=config)


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is asked of the hub in the block: what is in its cache is taken as it is."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


class _Hub:
    """The hub, which is asked whether it answers when something is first wanted of it."""

    def __init__(self) -> None:
        self._silence: str | None = None
        self._asked = False

    def fetch(self, name: str, listener: Listener) -> str:
        """Brings weights into the cache; why that cannot be done, or an empty text."""
        if not self._asked:
            self._silence, self._asked = _why_silent(), True
        if self._silence:
            return f"its weights are not on this machine, and {self._silence}"
        listener.say(f"fetching the weights of {name}")
        try:
            build_backbone(name, pretrained=True)
        except BasisPruneError as error:
            return str(error)
        return ""


def _why_silent() -> str:
    """Why the hub cannot be asked, in a clause; empty if it answers."""
    if constants.is_offline_mode():
        return "the hub is switched off (HF_HUB_OFFLINE)"
    answers = _within(_SECONDS, lambda: huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_SECONDS / 2))
    return "" if answers else "the hub does not answer"


def _within(seconds: float, ask: Callable[[], object]) -> bool:
    """Whether the call ends well in that time; where even a name server keeps silent, nobody waits for it longer."""
    ended: list[bool] = []

    def run() -> None:
        try:
            ask()
        except Exception:
            return
        ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(ended)


def _local_file(name: str, folder: Path | None) -> Path | None:
    """The file of weights for the name, with or without its tag (resnet50.a1_in1k, resnet50)."""
    if folder is None:
        return None
    stems = dict.fromkeys([name, name.partition(".")[0]])
    return next((path for stem in stems for end in _SUFFIXES if (path := folder / f"{stem}{end}").is_file()), None)


def refuse_unknown(names: Sequence[str], given: Collection[str] = ()) -> None:
    """Raises ConfigError for names that are neither timm's, nor factories, nor folders, or come twice."""
    faults = [f"{name!r} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    odd = [name for name in names if name not in given and ":" not in name and not timm.is_model(name)]
    odd = [name for name in odd if not Path(name).is_dir()]
    listed = timm.list_models() if odd else []
    faults += [f"timm has no model {name!r}.{nearest(name.partition('.')[0], listed, most=3)}" for name in odd]
    if not names:
        faults.append(f"none given; pass names of timm models, or {AUTO!r}")
    if faults:
        raise ConfigError.of("models", faults)
