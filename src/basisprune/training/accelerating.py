"""The Accelerator of a training: its device, its precision, and the tracker that its numbers go to."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from torch import nn

from basisprune.errors import ConfigError, MissingExtraError
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.watching import example_input, parameters_of, upstream, watch_run
from basisprune.training.config import TrainConfig
from basisprune.transfer.model import spec_of
from basisprune.types import dotted


def require_tracker(config: TrainConfig) -> None:
    """Raise MissingExtraError for a tracker that is not installed."""
    if config.tracker is not None and find_spec(config.tracker) is None:
        raise MissingExtraError(config.tracker, extra=config.tracker)


def make_accelerator(config: TrainConfig, checkpoint: str | Path | None = None) -> Accelerator:
    """An Accelerator for the run: its precision and, by name, its tracker (whose logs lie by the checkpoint).

    Raises MissingExtraError for a tracker that is not installed, ConfigError for a precision that the device
    does not have.
    """
    require_tracker(config)
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


def wrapped(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """The model as Accelerate runs it: by itself, or with gradients that several processes have in common.

    Processes would wait forever for the gradient of what takes no part in a step, such as a norm that nothing reads.
    To look for such parameters in each step costs time, so that it is only done if a run shows one.
    """
    # A layer that is left out at random may be so in one process only, and they must all look or none.
    undecided = accelerator.num_processes > 1 and accelerator.ddp_handler is None
    if undecided and Processes.here().total(int(has_idle_parameters(model))):
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    return accelerator.prepare_model(model)  # type: ignore[no-any-return]


def has_idle_parameters(model: nn.Module) -> bool:
    """Whether the output of the model in training does not depend on something that is trained."""
    example = example_input(model, spec_of(model).shape)
    nodes = upstream(watch_run(model, example, train=True, whole=True).output_nodes)
    used = parameters_of(nodes)
    return any(each.requires_grad and id(each) not in used for each in model.parameters())


def as_shown(config: Mapping[str, object]) -> dict[str, int | float | str]:
    """The settings as trackers take them: numbers and texts under dotted names."""
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in dotted(config)}
