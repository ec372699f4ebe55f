"""The one training: what it chooses, its epochs, restarts and resume (the paper's Algorithm 1, `finetuning`)."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from basisprune.errors import CheckpointError, ConfigError
from basisprune.files import sound_or_aside, write_checked
from basisprune.torchkit.processes import Processes, answering
from basisprune.torchkit.running import copied, refuse_untrainable
from basisprune.torchkit.surgery import named_tensors
from basisprune.training.checkpoint import EpochRecord, Past, refuse_other_run, save_checkpoint
from basisprune.training.choosing import choose, divide
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import Data, Evaluation
from basisprune.training.lessons import Session
from basisprune.training.progress import TrainingClock, callback_or_bar
from basisprune.training.trainer import DivergedError, Images, Trainer, make_accelerator

logger = logging.getLogger(__name__)

_RESTARTS, _SLOWER = 3, 3.0
"""How often a training that diverges starts again, and how much more slowly each time."""
_LOST = 0.1
"""A training that has lost this much of a share, beyond its start, has diverged."""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FitResult:
    """The trained model, one record for each epoch, and the configuration with all choices made."""

    model: nn.Module
    history: tuple[EpochRecord, ...]
    config: TrainConfig


def check_patience(config: TrainConfig, val: object) -> None:
    """Raise ConfigError where the training is to end when held-out images say so, and there are none."""
    if config.patience is not None and config.choices is None and val is None:
        raise ConfigError(f"patience: {config.patience} given, but no validation images to judge by; pass val")


def fit(
    model: nn.Module,
    train: Data,
    val: Data | None,
    config: TrainConfig,
    *,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    inplace: bool = False,
    session: Session | None = None,
) -> FitResult:
    """Train norms, basis scales and classifier as `config` says; with `train="all"`, all weights.

    A network in float64 is trained in it. One in bfloat16 or float16 is trained in float32, because steps of training
    are lost to rounding there, and comes back in its own precision. Accelerate carries the training: run it under
    `accelerate launch` or `torchrun` for several GPUs or nodes, which divide each batch among them, and all see the
    folder of the checkpoint.

    Args:
        model: The network; it is not changed, unless `inplace`.
        train: Labelled images (or a loader of pixels), prepared as the model's `input_spec` says; with another task in
            the session, any iterable of batches that the task reads.
        val: The same for validation, or None.
        config: How to train. With `choices`, short runs on the training images find the learning rate and more; some of
            these images are held out, and the weights are those of the best epoch by them; a training that diverges
            starts again at a third of its rate. With `patience`, the training ends after this many epochs without a
            better accuracy on the images held out, or else on `val`, with the best weights. With `distill`, it also
            learns what the session's teacher says of each augmented batch in eval mode.
        checkpoint: A file for the state after each epoch. A run that was killed goes on from it and ends in the same
            weights; it needs the same teacher. What was chosen is written beside it.
        progress: Whether to show a bar; None: in a terminal only.
        inplace: Whether to train the model itself instead of a copy.
        session: Teacher, callback, task and more.

    Raises:
        TrainingError: The loss is no longer finite; the last checkpoint stays.
        CheckpointError: The checkpoint belongs to another run.
        ConfigError: There is no teacher to learn from, or a wrong one, or nothing to be patient about.
    """
    session, path = session or Session(), None if checkpoint is None else Path(checkpoint)
    refuse_untrainable(model, "fit")
    check_patience(config, val)
    model = model if inplace else copied(model)
    train_model = _train if config.choices is None else _choose_and_train
    with in_full_precision(model), answering():
        return train_model(model, Images(train, val), config, session, path, progress)


def _choose_and_train(
    model: nn.Module, images: Images, config: TrainConfig, session: Session, path: Path | None, progress: bool | None
) -> FitResult:
    halves = divide(model, images, config, session)
    choice = _Choice(config, None if path is None else path.with_name(f"{path.name}.choice.json"), session)
    chosen = choice.read() or choice.write(choose(model, halves, config, session))
    untouched: Mapping[str, Tensor] = copy.deepcopy(model.state_dict())
    before: Evaluation | None = None
    if halves.proper.held_out is not None:
        accelerator = session.accelerator or make_accelerator(chosen)
        before = Trainer(model, halves.proper, chosen, accelerator, session).evaluated(halves.proper.held_out)
    for _ in range(_RESTARTS):
        try:
            return _train(model, halves.proper, chosen, session, path, progress, before=before)
        except DivergedError as error:
            chosen = replace(chosen, lr=chosen.lr / _SLOWER, min_lr=chosen.min_lr / _SLOWER)
            session.log(f"the training diverged ({error.args[0]}); it starts again at learning rate {chosen.lr:.2g}")
            model.load_state_dict(untouched)
            if path is not None:
                Processes.here().on_main(lambda: path.unlink(missing_ok=True))
            choice.write(chosen)
    return _train(model, halves.proper, chosen, session, path, progress)


def _train(
    model: nn.Module,
    images: Images,
    config: TrainConfig,
    session: Session,
    path: Path | None,
    progress: bool | None,
    *,
    before: Evaluation | None = None,
) -> FitResult:
    """Train for all epochs; raise DivergedError once the model is worse than `before`."""
    accelerator = session.accelerator or make_accelerator(config, path)
    trainer = Trainer(model, images, config, accelerator, session)
    log = logger.warning if session.callback is None else session.callback.log
    past = Past() if path is None else trainer.resume(path, log)
    callback, show = (session.callback, progress) if accelerator.is_main_process else (None, False)
    with trainer.tracked(), callback_or_bar(callback, show=show) as shown:
        clock = TrainingClock(config.epochs, trainer.steps, shown)
        while not session.ends(past, config):
            record = trainer.epoch(len(past.history), clock)
            if before is not None and has_diverged(record, before, is_share=session.task.is_share):
                losses = f"{record.held_out_loss:.3g} after epoch {record.epoch + 1}, {before.loss:.3g} before"
                raise DivergedError(f"loss on images held out: {losses}")
            past = trainer.after(past, record)
            if path is not None and accelerator.is_main_process:
                save_checkpoint(path, trainer.model, trainer.optimizer, config, past, accelerator.scaler)
    trainer.finish(past)
    return FitResult(trainer.model, past.history, config)


def has_diverged(record: EpochRecord, before: Evaluation, *, is_share: bool) -> bool:
    """Whether the epoch left the network worse than it was before the training, on the images held out.

    A higher loss alone may be confidence; the metric has to be no better, or far worse.

    >>> untrained = Evaluation(loss=2.3, accuracy=0.1, count=200)
    >>> has_diverged(EpochRecord(0, 1e-3, 2.4, 0.1, None, None, 2.5, 0.1), untrained, is_share=True)
    True
    >>> has_diverged(EpochRecord(0, 1e-3, 2.0, 0.3, None, None, 2.5, 0.4), untrained, is_share=True)
    False
    """
    loss, metric = record.held_out_loss, record.held_out_accuracy
    if loss is None or metric is None:
        return False
    return loss > before.loss and metric <= before.accuracy + (-_LOST if is_share and before.accuracy > 0.5 else 0.0)


@dataclass(frozen=True)
class _Choice:
    """What was chosen for a training, in a file beside its checkpoint, so that a run that resumes trains the same."""

    asked: TrainConfig
    path: Path | None
    session: Session

    def read(self) -> TrainConfig | None:
        """Return what an earlier start chose; raise CheckpointError if it was asked for something else."""
        path = self.path
        if path is None:
            return None
        content = Processes.here().from_main(lambda: sound_or_aside(path, self.session.log) or b"")
        if not content:
            return None
        try:
            found = json.loads(content)
            asked, taken = found["asked"], TypeAdapter(TrainConfig).validate_json(json.dumps(found["taken"]))
        except (ValueError, TypeError, KeyError, ValidationError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to choose again") from error
        refuse_other_run(path, asked, self.asked)
        return replace(taken, workers=self.asked.workers, tracker=self.asked.tracker)

    def write(self, chosen: TrainConfig) -> TrainConfig:
        path = self.path
        if path is not None:
            content = json.dumps({"asked": asdict(self.asked), "taken": asdict(chosen)}, indent=1).encode()
            Processes.here().on_main(lambda: write_checked(path, content))
        return chosen


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Hold every half-precision tensor of the model in float32 temporarily; the tensors stay the same objects."""
    before = [(tensor, tensor.dtype) for _, tensor in named_tensors(model) if tensor.dtype in _HALF]
    for tensor, _ in before:
        _set_dtype(tensor, torch.float32)
    try:
        yield
    finally:
        for tensor, dtype in before:
            _set_dtype(tensor, dtype)


def _set_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.grad = None
    tensor.data = tensor.data.to(dtype)
