"""YOLO networks of Ultralytics: with its loaders, its loss and its metric, to a smaller file that it loads and exports.

Ultralytics is under the AGPL-3.0 and no part of this package; it is imported only when a function here is called.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, Unpack, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from basisprune.budget import Budget
from basisprune.callback import Callback
from basisprune.data import Loaders
from basisprune.errors import ConfigError, MissingExtraError, pass_on
from basisprune.files import atomic, user_path
from basisprune.runs.compress import Compressed
from basisprune.runs.compress import compress as compress_network
from basisprune.runs.settings import Options
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.tasks.outcomes import Rows

Theirs: TypeAlias = Any
"""What Ultralytics makes: it has no types that a checker could read."""
Batch: TypeAlias = Mapping[str, Theirs]
FILE = "yolo.pt"
_BITS = 10  # one for each IoU from 0.5 to 0.95
_KINDS = {  # of task: the class of its networks, what of the validator's statistics counts, and the metric
    "detect": ("DetectionModel", "tp", "mAP50-95"),
    "segment": ("SegmentationModel", "tp_m", "mAP50-95 of masks"),
    "pose": ("PoseModel", "tp_p", "mAP50-95 of poses"),
    "classify": ("ClassificationModel", "", "accuracy"),
}
_PARTS = ("train", "val", "confirm", "test")
_STORED = {"epoch": -1, "best_fitness": None, "ema": None, "updates": None, "optimizer": None}
_REBUILT = "a network made smaller by basisprune, which no YAML describes; Ultralytics cannot train it, basisprune can"


def compress(
    model: object,
    data: str | Path,
    budget: Budget | None = None,
    *,
    output: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    callback: Callback | None = None,
    **options: Unpack[Options],
) -> Compressed:
    """Return the smallest YOLO network within the budget, by default a loss of one point of mAP50-95 (or accuracy).

    Arguments and result are those of `basisprune.compress`, but for those below. With `output`, the result is also
    written as a file for YOLO, yolo.pt; `save` writes one anywhere.

    Args:
        model: A `YOLO`, or the path of a .pt or YAML file. Ultralytics runs code that either may
            contain: pass only your own. A network from a YAML gets the classes of the data, and random weights.
        data: The YAML of a dataset of Ultralytics, or a folder for classifiers; only your own, because a cache beside
            its labels may run code too. Images under `confirm:` certify the budget; without that entry, half of those
            under `val:` do. Nothing is downloaded.
        budget: What may be lost, or how large the result may be.
        output: A folder for the result.
        settings: Those of Ultralytics: imgsz, batch, workers, augmentation, gains of the loss. There is no mosaic
            unless it is asked for: the last epochs of Ultralytics' training have none either.
        callback: Receives each step.
        **options: Those of `basisprune.compress`.

    Raises:
        ConfigError: The network, the data or the settings cannot be used.
        MissingExtraError: Ultralytics is not installed.
    """
    kit = YoloKit.of(model, data, settings)
    given = cast("Options", {"task": kit.task, **options})
    result = compress_network(kit.network, kit.loaders, budget, output=output, callback=callback, **given)
    if output is not None:
        save(result.model, user_path(output, "output") / FILE)
    return result


def save(network: nn.Module, path: str | Path) -> Path:
    """Write a network that was made here, such as `result.model`, as a .pt file that `YOLO(path)` loads."""
    plain: Theirs = copy.deepcopy(network).cpu()
    for module, names in (
        (plain.model[-1], ("dynamic", "export")),
        (plain, ("input_spec", "built_by", "file_notes", "classes")),
    ):
        for name in names:
            vars(module).pop(name, None)
    for module in plain.modules():
        if isinstance(getattr(module, "bn", None), nn.Identity):  # as Ultralytics leaves convs with their norm in them
            del module.bn
            module.forward = module.forward_fuse
    plain.yaml = {**plain.yaml, "backbone": [[-1, 1, _REBUILT, []]], "head": []}  # or train would build the large one
    plain.args = dict(vars(plain.args))
    stored = {**_STORED, "model": plain, "train_args": plain.args, "version": _library("").__version__}
    where = user_path(path, "save")
    with atomic(where) as file:
        torch.save(stored, file)
    return where


def build(task: str, cfg: Mapping[str, object]) -> nn.Module:
    """Build a network with random weights from the content of a YAML: the function that bundles name."""
    kind = getattr(_library("nn.tasks"), _KINDS[task][0])
    network = kind(dict(cfg), ch=cfg.get("channels", 3), verbose=False)
    network.task = task  # which files say
    return _prepared(network)


def _prepared(network: Theirs) -> nn.Module:
    """The network, which answers in eval mode as its exported files do, and keeps no grid of an earlier input."""
    head = network.model[-1]
    head.dynamic = head.export = True
    return cast(nn.Module, network)


@dataclass(frozen=True)
class YoloKit:
    """What `basisprune.compress` and the stages need: a network, `loaders` and a `task`.

    `args` are the settings of Ultralytics, `data` what it knows of the dataset.
    """

    network: nn.Module
    kind: str
    args: Theirs
    data: Mapping[str, Theirs]
    validator: Theirs

    @classmethod
    def of(cls, model: object, data: str | Path, settings: Mapping[str, object] | None = None) -> YoloKit:
        """Read the network and the description of the data; arguments and errors as `compress`."""
        yolo = _opened(model)
        if yolo.task not in _KINDS:
            raise ConfigError(f"model: a network for {yolo.task!r} given; possible are {', '.join(_KINDS)}")
        if not Path(data).exists():
            raise ConfigError(f"data: there is no {data}; nothing is downloaded here, get it with Ultralytics first")
        utils, is_of_classes = _library("data.utils"), yolo.task == "classify"
        with _understood("data", data):
            read = utils.check_cls_dataset(data) if is_of_classes else utils.check_det_dataset(data, autodownload=False)
        known = {"task": yolo.task, "model": str(yolo.model_name), "data": str(data), "plots": False, "mosaic": 0.0}
        with _understood("settings", settings):
            args = _library("cfg").get_cfg(overrides={**yolo.overrides, **known, **(settings or {})})
        args.imgsz = _library("utils.checks").check_imgsz(args.imgsz, stride=32, max_dim=1)
        network = _network(yolo, read)
        network.args, network.names = copy.copy(args), read["names"]
        if is_of_classes:
            network.classes = tuple(read["names"].values())
        network.file_notes = _notes(network, yolo.task, args)
        with TemporaryDirectory() as scratch:  # it would make a folder of its own
            kind = yolo.task_map[yolo.task]["validator"]
            validator = kind(save_dir=Path(scratch), args={**vars(args), "mode": "val", "rect": False})
        validator.data = read
        if not is_of_classes:
            validator.init_metrics(network)
        return cls(network, yolo.task, args, read, validator)

    @cached_property
    def loaders(self) -> Loaders:
        """The images by Ultralytics' datasets: augmented to train on, all square."""
        given = {part: self.data[part] for part in _PARTS if self.data.get(part)}
        if self.kind == "classify" and (confirm := Path(given["train"]).with_name("confirm")).is_dir():
            given["confirm"] = confirm
        elif isinstance(given.get("confirm"), str):  # which Ultralytics does not know
            given["confirm"] = str((Path(self.data["path"]) / given["confirm"]).resolve())
        sets = {part: self._images(path, "train" if part == "train" else "val") for part, path in given.items()}
        if "val" not in sets:
            raise ConfigError("data: it has no images under val:, on which networks are compared")
        if "confirm" not in sets:
            order = np.random.default_rng(0).permutation(len(sets["val"])).tolist()
            val, half = sets["val"], len(order) // 2
            sets |= {"val": Subset(val, sorted(order[:half])), "confirm": Subset(val, sorted(order[half:]))}
        names = tuple(self.data["names"].values()) if self.kind == "classify" else ()
        read = {part: self._loader(images, part) for part, images in sets.items()}
        return Loaders(read["train"], read["val"], read.get("test"), read["confirm"], classes=names)

    def _images(self, path: object, mode: str) -> Theirs:
        if self.kind == "classify":
            return _library("data").ClassificationDataset(path, self.args, augment=mode == "train", prefix=mode)
        make = _library("data").build_yolo_dataset
        return make(self.args, path, self.args.batch, self.data, mode=mode, rect=False)

    def _loader(self, images: Dataset[object], part: str) -> DataLoader[object]:
        whole = images.dataset if isinstance(images, Subset) else images
        collate, workers = getattr(whole, "collate_fn", None), self.args.workers
        return DataLoader(images, self.args.batch, part == "train", collate_fn=collate, num_workers=workers)

    @cached_property
    def task(self) -> Task:
        """Ultralytics' loss, and its metric by its own validator: the same number as `val(rect=False)` gives."""
        if self.kind == "classify":
            return replace(CLASSIFICATION, read=_read_classes, output=_logits)
        name = _KINDS[self.kind][2]
        return Task(
            self.kind, None, self._outcome, self._mean_precision, name, is_share=True, read=_read, model_loss=_loss
        )

    def _outcome(self, output: object, batch: Batch) -> Tensor:
        """For each image: how many objects of each class there are, and confidence and class of each that is said.

        With the class come the bits of the IoUs at which it is right.
        """
        validator, stats = self.validator, self.validator.metrics.stats
        validator.metrics.clear_stats()
        validator.device = batch["cls"].device
        validator.update_metrics(validator.postprocess(output), batch)
        right, sure, said, there = (stats[key] for key in (_KINDS[self.kind][1], "conf", "pred_cls", "target_cls"))
        classes, most = len(self.data["names"]), self.args.max_det
        rows = np.zeros((len(sure), classes + 2 * most))
        for row, bits, scores, numbers, targets in zip(rows, right, sure, said, there, strict=True):
            row[:classes] = np.bincount(targets.astype(int).ravel(), minlength=classes)
            row[classes : classes + len(scores)] = scores
            row[classes + most :][: len(scores)] = numbers * (1 << _BITS) + bits @ (1 << np.arange(_BITS))
        validator.metrics.clear_stats()
        return torch.from_numpy(rows)

    def _mean_precision(self, rows: Rows) -> float:
        classes, most = len(self.data["names"]), self.args.max_det
        there = rows[:, :classes].sum(0).astype(int)
        sure, codes = rows[:, classes : classes + most], rows[:, classes + most :].astype(int)
        order = np.lexsort((codes[sure > 0], -sure[sure > 0]))  # of equals the same first, in whatever order they come
        scores, codes = sure[sure > 0][order], codes[sure > 0][order]
        if not there.any() or not len(scores):
            return 0.0
        right = (codes[:, None] >> np.arange(_BITS) & 1).astype(bool)
        measure = _library("utils.metrics").ap_per_class
        return float(measure(right, scores, codes >> _BITS, np.repeat(np.arange(classes), there))[5].mean())


def _library(part: str) -> Theirs:
    """A module of Ultralytics; raises MissingExtraError where it is not installed."""
    pillows = Image.open  # which Ultralytics replaces by its own, for everybody
    try:
        # Not from Python's own folder, as others are: it notes the one it is first imported in as a place for files.
        return import_module(f"ultralytics.{part}" if part else "ultralytics")
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), extra="ultralytics") from error
    finally:
        Image.open = pillows


@contextmanager
def _understood(what: str, given: object) -> Iterator[None]:
    """Turn what Ultralytics raises, of many kinds, into a ConfigError."""
    try:
        yield
    except Exception as error:
        pass_on(error)
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what}: Ultralytics cannot take {given} ({type(error).__name__}: {reason})") from error


def _opened(model: object) -> Theirs:
    """The YOLO that was given or lies in a file; no name is looked for on the network."""
    kind = _library("").YOLO
    if isinstance(model, str | Path):
        if Path(model).suffix not in (".pt", ".yaml", ".yml") or (
            Path(model).suffix == ".pt" and not Path(model).is_file()
        ):
            raise ConfigError(f"model: {str(model)!r} given; a YOLO, a .pt file that exists, or a YAML is needed")
        with _understood("model", model):
            return kind(str(model))
    if not isinstance(model, kind) or not isinstance(model.model, nn.Module):
        raise ConfigError(f"model: {type(model).__name__} given; a YOLO with a network of PyTorch is needed")
    return model


def _network(yolo: Theirs, data: Mapping[str, Theirs]) -> Theirs:
    """A copy of the network to train; one of a YAML, which has no weights yet, is built for the classes of the data."""
    classes, cfg = len(data["names"]), {**yolo.model.yaml, "channels": yolo.model.yaml.get("channels", 3)}
    if not yolo.ckpt and str(yolo.model_name).endswith((".yaml", ".yml")):
        cfg |= {"nc": classes, **({"kpt_shape": list(data["kpt_shape"])} if "kpt_shape" in data else {})}
        network: Theirs = build(yolo.task, cfg)
    else:
        network = _prepared(copy.deepcopy(yolo.model).float().cpu())
    held = len(network.names)
    if held != classes:
        raise ConfigError(f"data: it has {classes} classes, and the network {held}; pass the data it was trained for")
    network.__dict__.pop("criterion", None)
    network.built_by = f"{__name__}:build(task={yolo.task!r}, cfg={cfg!r})"
    return network


def _notes(network: Theirs, task: str, args: Theirs) -> dict[str, str]:
    """The metadata by which `YOLO("model.onnx")` knows what a file is; its values are Python literals."""
    head, side = network.model[-1], args.imgsz
    facts = {
        "task": task,
        "stride": int(max(network.stride)),
        "batch": 1,
        "imgsz": [side, side],
        "names": network.names,
    }
    facts |= {"channels": network.yaml.get("channels", 3), "end2end": bool(getattr(head, "end2end", False))}
    facts |= {"args": {"dynamic": True}, "description": "a YOLO network, made small by basisprune"}
    if task == "pose":
        facts["kpt_shape"] = list(head.kpt_shape)
    return {name: str(value) for name, value in facts.items()}


def _read(batch: Batch) -> tuple[Tensor, dict[str, Theirs]]:
    """Images in [0, 1], and all else; the validator asks for the size of images, so an empty batch stays there."""
    images = batch["img"].float() / 255
    return images, {**batch, "img": images[:0]}


def _read_classes(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch["img"], batch["cls"]


def _logits(raw: Tensor) -> Tensor:
    """The scores of a classifier, which gives them in training mode, and probabilities in eval mode."""
    is_share = bool((raw >= 0).all()) and torch.allclose(raw.sum(1), raw.new_ones(()), atol=1e-3)
    return raw.clamp_min(torch.finfo(raw.dtype).tiny).log() if is_share else raw


def _loss(model: Theirs, images: Tensor, batch: Batch) -> Tensor:
    """The mean loss of an image. The head alone is in training mode, in which it gives what the loss is made of."""
    model.model[-1].training = True
    total: Tensor = model.init_criterion()(model(images), {**batch, "img": images})[0].sum() / len(images)
    return total
