"""A training's state on disk: written atomically, read without unpickling objects."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from basisprune.errors import CheckpointError
from basisprune.files import atomic
from basisprune.training.config import TrainConfig

FORMAT = 1
# What may differ between a run and its continuation without changing the outcome.
_FREE = frozenset({"workers", "tracker"})


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    history: list[dict[str, Any]],
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Writes the state of a training to `path`; a reader sees the old file or the new one, never a part.

    `scaler` is that of the loss, which a training in float16 has.
    """
    state = {
        "format": FORMAT,
        "config": json.dumps(asdict(config)),
        "history": json.dumps(history),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {} if scaler is None else scaler.state_dict(),
    }
    with atomic(path) as file:
        torch.save(state, file)


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    scaler: torch.amp.GradScaler | None = None,
) -> list[dict[str, Any]]:
    """The history of the training in `path`, whose state goes into model, optimizer and scaler.

    Raises CheckpointError for a file that is damaged, of another format, or of a run with another
    configuration or network; model and optimizer are then untouched.
    """
    state = _read(path)
    try:
        old, history = json.loads(state["config"]), json.loads(state["history"])
        found = {name: tuple(value.shape) for name, value in state["model"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: parts are missing ({error!r}); delete it to start anew") from error
    new = json.loads(json.dumps(asdict(config)))
    differing = [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted({*old, *new} - _FREE)
        if old.get(key) != new.get(key)
    ]
    if differing:
        raise CheckpointError.of(f"{path}: belongs to a run with another configuration; use another path", differing)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if shapes != found:
        odd = sorted(name for name in {*shapes, *found} if shapes.get(name) != found.get(name))
        raise CheckpointError(
            f"{path}: belongs to another network ({len(odd)} tensors differ, first {odd[0]}); use another path"
        )
    try:
        optimizer.load_state_dict(state["optimizer"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its optimizer does not fit ({error}); use another path") from error
    model.load_state_dict(state["model"])
    if scaler is not None and state.get("scaler"):
        scaler.load_state_dict(state["scaler"])
    return history  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in many ways
        raise CheckpointError(f"{path}: cannot be read as a checkpoint ({error}); delete it to start anew") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path}: format {found} found, {FORMAT} is needed; delete it to start anew")
    return state
