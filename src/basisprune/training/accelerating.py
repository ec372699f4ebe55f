"""The Accelerator of a training: its device, its precision, and the tracker that its numbers go to."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration

from basisprune.errors import ConfigError, MissingExtraError
from basisprune.training.config import TrainConfig
from basisprune.types import dotted


def make_accelerator(config: TrainConfig, checkpoint: str | Path | None = None) -> Accelerator:
    """An Accelerator for the run: its precision and, by name, its tracker (whose logs lie by the checkpoint).

    Raises MissingExtraError for a tracker that is not installed, ConfigError for a precision that the device
    does not have.
    """
    if config.tracker is not None and find_spec(config.tracker) is None:
        raise MissingExtraError(config.tracker, extra=config.tracker)
    folder = str(Path(checkpoint).parent) if checkpoint is not None else "."
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != config.mixed_precision:
        AcceleratorState._reset_state()  # Accelerate keeps one precision per process, and refuses another
    try:
        return Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=config.tracker,
            project_config=ProjectConfiguration(folder, logging_dir=folder),
        )
    except ValueError as error:
        AcceleratorState._reset_state()
        raise ConfigError(f"mixed_precision: {config.mixed_precision!r} given; {error}") from error


def as_shown(config: Mapping[str, object]) -> dict[str, int | float | str]:
    """The settings as trackers take them: numbers and texts under dotted names."""
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in dotted(config)}
