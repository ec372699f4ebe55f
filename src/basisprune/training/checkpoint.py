"""A training's records of its epochs, and its state on disk, read without unpickling objects."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from basisprune.data.transforms import Augment
from basisprune.errors import CheckpointError
from basisprune.files import checked, read_checked, sound_or_aside
from basisprune.training.config import TrainConfig
from basisprune.transfer.pickles import load_tensors


@dataclass(frozen=True)
class EpochRecord:
    """What one pass over the training images showed; the accuracies are fractions, or the metric of the task.

    Where images are blended, the training accuracy counts the class that has most of an image. `held_out_...` are of
    the training images that are held out to judge epochs, if any are.
    """

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float | None
    val_loss: float | None
    val_accuracy: float | None
    held_out_loss: float | None = None
    held_out_accuracy: float | None = None

    @property
    def judged(self) -> tuple[float, float] | None:
        """The accuracy and the loss that the epoch is judged by, on images that were held out or else on validation."""
        if self.held_out_accuracy is not None:
            return self.held_out_accuracy, self.held_out_loss or 0.0
        return None if self.val_accuracy is None else (self.val_accuracy, self.val_loss or 0.0)


def best_epoch(history: Sequence[EpochRecord], noise: float = 0.0) -> int | None:
    """Return the place in the history of the best epoch; None where nothing was judged.

    That is the one with the highest accuracy, of equals the one with the smallest loss. With `noise`, it is the last
    one that is at most this much less accurate than all before it: the rate falls towards the end of a training, so
    that a small lead of an earlier epoch is more likely luck.

    >>> records = [EpochRecord(0, 0.1, 1.0, 0.5, 0.9, 0.6), EpochRecord(1, 0.1, 0.8, 0.6, 0.8, 0.6)]
    >>> best_epoch(records)
    1
    """
    judged = [(place, *record.judged) for place, record in enumerate(history) if record.judged is not None]
    if not judged:
        return None
    if noise:
        high = max(accuracy for _, accuracy, _ in judged)
        return [place for place, accuracy, _ in judged if accuracy >= high - noise][-1]
    return max(judged, key=lambda each: (each[1], -each[2], -each[0]))[0]


def out_of_patience(history: Sequence[EpochRecord], patience: int | None) -> bool:
    """Whether the last `patience` epochs brought nothing better; never without patience.

    >>> records = [EpochRecord(0, 0.1, 1.0, 0.5, 0.9, 0.6), EpochRecord(1, 0.1, 0.8, 0.6, 1.0, 0.5)]
    >>> out_of_patience(records, 1), out_of_patience(records, 2)
    (True, False)
    """
    best = best_epoch(history)
    return patience is not None and best is not None and len(history) - 1 - best >= patience


FORMAT = 1
_MOST_BYTES = 1 << 40
# What may differ between a run and its continuation without changing the outcome.
_FREE = frozenset({"workers", "tracker"})


@dataclass(frozen=True)
class Past:
    """What a training has behind it: a record for each epoch and, if it stops early, its best weights so far."""

    history: tuple[EpochRecord, ...] = ()
    best: Mapping[str, Tensor] | None = None


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    past: Past,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Writes the state of a training to `path`; a reader sees the old file or the new one, never a part.

    `scaler` is that of the loss, which a training in float16 has.
    """
    state = {
        "format": FORMAT,
        "config": json.dumps(asdict(config)),
        "history": json.dumps([asdict(record) for record in past.history]),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {} if scaler is None else scaler.state_dict(),
        "best": None if past.best is None else dict(past.best),
    }
    with checked(path) as file:
        torch.save(state, file)


def set_damaged_aside(path: Path, say: Callable[[str], None]) -> None:
    """Gives a checkpoint with a wrong checksum another name, and tells `say`, so that the training starts anew."""
    sound_or_aside(path, say, most=_MOST_BYTES)


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    scaler: torch.amp.GradScaler | None = None,
) -> Past:
    """The past of the training in `path`, whose state goes into model, optimizer and scaler.

    Raises CheckpointError for a file that is damaged, of another format, or of a run with another
    configuration or network; model and optimizer are then untouched.
    """
    state = _read(path)
    refuse_other_run(path, state.config, config)
    for weights in (state.model, state.past.best):
        if weights is not None:
            _refuse_other_network(path, weights, model)
    try:
        optimizer.load_state_dict(_stepping_as(optimizer, state.optimizer))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its optimizer does not fit ({error}); use another path") from error
    model.load_state_dict(state.model)
    if scaler is not None and state.scaler:
        scaler.load_state_dict(state.scaler)
    return state.past


def _stepping_as(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the kernel of this optimizer, which may not be that of the one that was saved."""
    fused = {"fused": optimizer.defaults["fused"]} if "fused" in optimizer.defaults else {}
    return {**state, "param_groups": [{**group, **fused} for group in state["param_groups"]]}


@dataclass(frozen=True)
class _State:
    """The parts of a checkpoint."""

    config: dict[str, object]
    past: Past
    model: dict[str, Tensor]
    optimizer: dict[str, object]
    scaler: dict[str, object]


def _read(path: Path) -> _State:
    try:
        state = load_tensors(io.BytesIO(read_checked(path, most=_MOST_BYTES)))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file fails in many ways
        raise CheckpointError(f"{path}: cannot be read as a checkpoint ({error}); delete it to start anew") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path}: format {found} found, {FORMAT} is needed; delete it to start anew")
    try:
        history = tuple(EpochRecord(**record) for record in json.loads(state["history"]))
        best = None if state.get("best") is None else dict(state["best"])
        config, weights = json.loads(state["config"]), dict(state["model"])
        return _State(_completed(config), Past(history, best), weights, state["optimizer"], state.get("scaler", {}))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: parts are missing ({error!r}); delete it to start anew") from error


def _completed(config: dict[str, object]) -> dict[str, object]:
    """The configuration with the defaults of settings that did not exist when it was written."""
    changes = config.get("augmentation", {})
    if not isinstance(changes, Mapping):
        raise TypeError(f"augmentation: {changes!r}")
    return {**asdict(TrainConfig()), **config, "augmentation": {**asdict(Augment()), **changes}}


def refuse_other_run(path: Path, old: Mapping[str, object], config: TrainConfig) -> None:
    """Raise CheckpointError that lists what differs, unless a training was asked for the same."""
    new = json.loads(json.dumps(asdict(config)))
    differing = [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted({*old, *new} - _FREE)
        if old.get(key) != new.get(key)
    ]
    if differing:
        raise CheckpointError.of(f"{path}: belongs to a run with another configuration; use another path", differing)


def _refuse_other_network(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    found, shapes = (
        {name: tuple(value.shape) for name, value in each.items()} for each in (weights, model.state_dict())
    )
    if shapes != found:
        odd = sorted(name for name in {*shapes, *found} if shapes.get(name) != found.get(name))
        raise CheckpointError(
            f"{path}: belongs to another network ({len(odd)} tensors differ, first {odd[0]}); use another path"
        )
