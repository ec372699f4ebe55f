"""A training's records of its epochs, and its state on disk, read without unpickling objects."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from basisprune.data.transforms import Augment
from basisprune.errors import CheckpointError
from basisprune.files import checked, read_checked, sound_or_aside
from basisprune.training.config import TrainConfig
from basisprune.transfer.checkpoints import load_tensors
from basisprune.types import dotted

FORMAT = 1
_MOST_BYTES = 1 << 40
# What may differ between a run and its continuation without changing the outcome.
_FREE = frozenset({"workers", "tracker"})


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
    def validated(self) -> tuple[float | None, float | None]:
        """The accuracy and loss on validation images, or else on training images that were held out, if any."""
        if self.val_accuracy is None:
            return self.held_out_accuracy, self.held_out_loss
        return self.val_accuracy, self.val_loss

    @property
    def judged(self) -> tuple[float, float] | None:
        """The accuracy and loss that judge the epoch: on images that were held out, or else on validation images."""
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


@dataclass(frozen=True)
class Past:
    """What a training has behind it: a record for each epoch and, if epochs are judged, its best weights so far."""

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
    """Write the state of a training to `path`, atomically; a training in float16 has a `scaler` of the loss."""
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


def move_damaged(path: Path, log: Callable[[str], None]) -> None:
    """Rename a checkpoint with a wrong checksum, and log it, so that the training starts anew."""
    sound_or_aside(path, log, most=_MOST_BYTES)


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    scaler: torch.amp.GradScaler | None = None,
) -> Past:
    """Load the state of a training into model, optimizer and scaler, and return its past.

    Raises CheckpointError for a file that is damaged, of another format, or of a run with another
    configuration or network; model and optimizer are then untouched.
    """
    old, past, state = _read(path)
    refuse_other_run(path, old, config)
    for weights in (state["model"], past.best):
        if weights is not None:
            _refuse_other_network(path, weights, model)
    # The kernel is this optimizer's, which may not be that of the one that was saved.
    fused = {"fused": optimizer.defaults["fused"]} if "fused" in optimizer.defaults else {}
    try:
        groups = [{**group, **fused} for group in state["optimizer"]["param_groups"]]
        optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its optimizer does not fit ({error}); use another path") from error
    model.load_state_dict(state["model"])
    if scaler is not None and state.get("scaler"):
        scaler.load_state_dict(state["scaler"])
    return past


def _read(path: Path) -> tuple[dict[str, object], Past, dict[str, Any]]:
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
        state["model"] = dict(state["model"])
        if "optimizer" not in state:
            raise KeyError("optimizer")
        return _completed(json.loads(state["config"])), Past(history, best), state
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: parts are missing ({error!r}); delete it to start anew") from error


def _completed(config: dict[str, object]) -> dict[str, object]:
    """Return the configuration with the defaults of settings that did not exist when it was written."""
    changes = config.get("augmentation", {})
    if not isinstance(changes, Mapping):
        raise TypeError(f"augmentation: {changes!r}")
    return {**asdict(TrainConfig()), **config, "augmentation": {**asdict(Augment()), **changes}}


def refuse_other_run(path: Path, old: Mapping[str, object], config: TrainConfig) -> None:
    """Raise CheckpointError that lists what differs, unless a training was asked for the same."""
    differing = differences(old, json.loads(json.dumps(asdict(config))), free=_FREE)
    if differing:
        raise CheckpointError.of(f"{path}: belongs to a run with another configuration; use another path", differing)


def differences(old: object, new: Mapping[str, object], *, free: Collection[str] = ()) -> list[str]:
    """List the settings, by dotted names, that differ between a file and now; those that are `free` may.

    >>> differences({"lr": 0.1, "plan": {"per": "mac"}}, {"lr": 0.1, "plan": {"per": "vector"}})
    ["plan.per: 'mac' there, 'vector' now"]
    """
    before, after = dict(dotted(old if isinstance(old, dict) else {})), dict(dotted(new))
    names = (name for name in {**before, **after} if name not in free and before.get(name, ...) != after.get(name, ...))
    return [f"{name}: {_short(before.get(name))} there, {_short(after.get(name))} now" for name in names]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_other_network(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    found, shapes = (
        {name: tuple(value.shape) for name, value in each.items()} for each in (weights, model.state_dict())
    )
    if shapes != found:
        odd = sorted(name for name in {*shapes, *found} if shapes.get(name) != found.get(name))
        raise CheckpointError(
            f"{path}: belongs to another network ({len(odd)} tensors differ, first {odd[0]}); use another path"
        )
