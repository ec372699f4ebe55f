"""A progress bar for training: loss, accuracy, images a second, time left."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torchmetrics import Metric


class TrainingProgress:
    """Shows how far a training is on stderr; with `show=None` only when that is a terminal."""

    def __init__(self, epochs: int, steps: int, *, show: bool | None = None) -> None:
        self.epochs, self.steps = epochs, steps
        self.visible = sys.stderr.isatty() if show is None else show
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  accuracy {task.fields[accuracy]:.3f}"),
            TextColumn("{task.fields[rate]:.0f} images/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self.visible,
        )
        self.task = self.progress.add_task(
            "training", total=epochs * steps, epoch=f"0/{epochs}", loss=0.0, accuracy=0.0, rate=0.0
        )

    def __enter__(self) -> TrainingProgress:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def step(self, epoch: int, images: int, loss: Metric, accuracy: Metric) -> None:
        """One more batch of `images` is done; loss and accuracy are those of the epoch so far."""
        if not self.visible:
            return
        task = self.progress.tasks[self.task]
        self.progress.update(
            self.task,
            completed=epoch * self.steps + task.completed % self.steps + 1,
            epoch=f"{epoch + 1}/{self.epochs}",
            loss=loss.compute().item(),
            accuracy=accuracy.compute().item(),
            rate=images * (task.speed or 0.0),
        )
