"""Progress on stderr: each training, and the whole search with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from basisprune.callback import Callback, NullCallback, Row, TrainingStep, Tried
from basisprune.errors import printable

_Clock = Callable[[], float]


def _bars(*, visible: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[info]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
        console=Console(stderr=True),
        disable=not visible,
    )


def _is_terminal() -> bool:
    """Whether stderr is a terminal; there is no stderr if whoever started the program has closed it."""
    return sys.stderr is not None and sys.stderr.isatty()


def duration(seconds: float) -> str:
    """Format a time in words.

    >>> duration(42), duration(200), duration(7300)
    ('40 s', '3 min', '2 h 2 min')
    """
    if seconds < 90:
        return f"{max(1, round(seconds / 10)) * 10} s" if seconds > 15 else f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _left(seconds: float | None) -> str:
    return f"{duration(seconds)} left" if seconds else ""


def _rest(step: TrainingStep) -> float:
    return step.seconds * (1 - step.share) / step.share


class SearchProgress:
    """How far a search is: about `candidates` networks, each tuned for at most `passes` over the images.

    A callback that draws bars in a terminal; elsewhere it writes lines by `write`. The time left is what the last
    candidates took, times those that are still expected.
    """

    def __init__(
        self,
        candidates: int,
        passes: int,
        write: Callable[[str], None],
        *,
        show: bool | None = None,
        clock: _Clock = time.monotonic,
    ) -> None:
        self.expected, self.passes, self.write, self.clock = candidates, passes, write, clock
        self.visible = _is_terminal() if show is None else show
        self.progress = _bars(visible=self.visible)
        self.task = self.progress.add_task("search", total=candidates, info="", left="")
        self.images, self.bar = _Bar(self.progress), _Bar(self.progress)
        self.rows: dict[str, Row] = {}
        self.live = Live(get_renderable=self.picture, console=self.progress.console, auto_refresh=self.visible)
        self.took: list[float] = []
        self.mark = clock()
        self.training: TrainingStep | None = None

    def __enter__(self) -> Self:
        if self.visible:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.visible:
            self.live.stop()

    def picture(self) -> Group:
        """Draw the networks so far, and the bars below them."""
        table = Table("network", "parameters", "ms", "validation", "state", box=None, pad_edge=False)
        for row in self.rows.values():
            milliseconds = "" if row.milliseconds is None else f"{row.milliseconds:.2f}"
            cells = (
                row.name,
                "" if row.parameters is None else f"{row.parameters:,}",
                milliseconds,
                row.value,
                row.state,
            )
            table.add_row(*(Text(printable(cell)) for cell in cells))
        return Group(*([table] if self.rows else []), self.progress)

    def shown(self, row: Row) -> None:
        self.rows[row.name] = row

    def log(self, line: str) -> None:
        if self.visible:
            lines = [printable(part) for part in line.split("\n")]
            self.progress.console.print("\n".join(lines), markup=False, highlight=False)
            self.progress.update(self.task, info=lines[-1][:60])
        else:
            self.write(line)

    def opened(self, done: int, total: int) -> None:
        if self.visible:
            self.images.draw("opening images", done, total)
            if done == total:
                self.images.remove()

    def judged(self, candidate: Tried) -> None:
        now = self.clock()
        self.took.append(now - self.mark)
        self.mark, self.training = now, None
        self.bar.remove()
        self.expected = max(self.expected, len(self.took))
        left = self.left()
        self.log(f"{candidate.summary}; about {duration(left)} left" if left else candidate.summary)
        self.progress.update(self.task, completed=len(self.took), total=self.expected, left=_left(left))

    def trained(self, step: TrainingStep) -> None:
        self.training = step if step.share > 0 else None
        if self.visible:
            self.bar.trained(step)
        self.progress.update(self.task, left=_left(self.left()))

    def left(self) -> float | None:
        """Return the seconds until the end of the search, None while nothing is known yet."""
        step, waiting = self.training, max(self.expected - len(self.took) - (self.training is not None), 0)
        pruned = self.took[1:][-3:]  # the first one is the unpruned network, which is trained differently
        if pruned:
            return (_rest(step) if step else 0.0) + waiting * sum(pruned) / len(pruned)
        if step:
            return _rest(step) + waiting * self.passes * step.seconds / (step.share * step.epochs_here)
        return None


class _Bar(NullCallback):
    """One bar among others, of a training or of anything else; it starts anew when less is done than before."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID | None = None
        self.last = 0

    def draw(self, description: str, done: int, total: int, info: str = "", left: str = "") -> None:
        if self.task is None or done < self.last:
            self.remove()
            self.task = self.progress.add_task("", total=total, info="", left="")
        self.progress.update(self.task, completed=done, description=description, info=info, left=left)
        self.last = done

    def trained(self, step: TrainingStep) -> None:
        known = "" if step.accuracy is None else f"accuracy {step.accuracy:.3f}  "
        info = f"loss {step.loss:.3f}  {known}{step.images / max(step.seconds, 1e-9):.0f} images/s"
        left = _left(_rest(step)) if step.share > 0 else ""
        self.draw(f"epoch {step.epoch + 1}/{step.epochs}", step.done, step.steps, info, left)

    def remove(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = None


@contextmanager
def callback_or_bar(callback: Callback | None, *, show: bool | None) -> Iterator[Callback]:
    """Yield the callback of a training; without one a bar, with `show=None` in a terminal only."""
    visible = _is_terminal() if show is None else show
    if callback is not None or not visible:
        yield callback or NullCallback()
        return
    with _bars(visible=True) as progress:
        yield _Bar(progress)


class TrainingClock:
    """Counts the steps of a training, and notifies the callback of each."""

    def __init__(self, epochs: int, steps: int, callback: Callback, *, clock: _Clock = time.monotonic) -> None:
        self.epochs, self.steps, self.callback, self.clock = epochs, steps, callback, clock
        self.done = self.images = 0
        self.start = clock()

    def step(self, epoch: int, images: int, loss: float, accuracy: float | None) -> None:
        """Count one more batch of `images`; loss and accuracy are those of the epoch so far."""
        self.done += 1
        self.images += images
        total = self.epochs * self.steps
        before = epoch * self.steps + (self.done - 1) % self.steps + 1 - self.done  # by a run that was killed
        self.callback.trained(
            TrainingStep(
                epoch=epoch,
                epochs=self.epochs,
                done=before + self.done,
                steps=total,
                share=self.done / max(total - before, 1),
                epochs_here=self.epochs - before / self.steps,
                seconds=self.clock() - self.start,
                images=self.images,
                loss=loss,
                accuracy=accuracy,
            )
        )
