"""Progress on stderr: each training, and the whole search with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torchmetrics import Metric

from basisprune.listener import Listener, Tried

_Clock = Callable[[], float]


def _bars(*, visible: bool) -> Progress:
    """Bars in one style: what is done, how far, what is known, and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[info]}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        disable=not visible,
    )


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(42), duration(200), duration(7300)
    ('40 s', '3 min', '2 h 2 min')
    """
    if seconds < 90:
        return f"{max(1, round(seconds / 10)) * 10} s" if seconds > 15 else f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class SearchProgress:
    """How far a search is: about `candidates` networks, each tuned for at most `passes` over the images.

    In a terminal it draws bars, in which trainings show up that start while it is open; elsewhere it writes
    lines by `write`. The time left is what the last candidates took, times those that are still expected.
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
        self.visible = sys.stderr.isatty() if show is None else show
        self.progress = _bars(visible=self.visible)
        self.task = self.progress.add_task("search", total=candidates, info="", left="")
        self.took: list[float] = []
        self.mark = clock()
        self.training: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        self.token = _open_search.set(self)
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        _open_search.reset(self.token)
        self.progress.stop()

    def say(self, line: str) -> None:
        """Shows a line about what happens now."""
        if self.visible:
            self.progress.console.print(line, markup=False, highlight=False)
            self.progress.update(self.task, info=line.splitlines()[-1][:60])
        else:
            self.write(line)

    def judged(self, candidate: Tried) -> None:
        """Shows one more candidate, and the time that is left."""
        now = self.clock()
        self.took.append(now - self.mark)
        self.mark, self.training = now, None
        self.expected = max(self.expected, len(self.took))
        left = self.left()
        self.say(f"{candidate.summary}; about {duration(left)} left" if left else candidate.summary)
        self.progress.update(self.task, completed=len(self.took), total=self.expected, left=_left(left))

    def trained(self, epochs: float, share: float, seconds: float) -> None:
        """A training of this many epochs is at this share, after this many seconds."""
        self.training = (seconds / (share * epochs), seconds * (1 - share) / share) if share > 0 else None
        self.progress.update(self.task, left=_left(self.left()))

    def left(self) -> float | None:
        """The seconds until the end of the search, None while nothing is known yet."""
        waiting = self.expected - len(self.took) - (self.training is not None)
        pruned = self.took[1:][-3:]  # the first one is the unpruned network, which is trained differently
        rest = self.training[1] if self.training else 0.0
        if pruned:
            return rest + max(waiting, 0) * sum(pruned) / len(pruned)
        if self.training:
            return rest + max(waiting, 0) * self.passes * self.training[0]
        return None


def _left(seconds: float | None) -> str:
    return f"{duration(seconds)} left" if seconds else ""


_open_search: ContextVar[SearchProgress | None] = ContextVar("search", default=None)


class TrainingProgress:
    """Shows how far a training is; with `show=None` only in a terminal. Inside a search it is one of its bars.

    The `listener` hears of each step, by default the search.
    """

    def __init__(
        self,
        epochs: int,
        steps: int,
        listener: Listener | None = None,
        *,
        show: bool | None = None,
        clock: _Clock = time.monotonic,
    ) -> None:
        self.epochs, self.steps, self.clock = epochs, steps, clock
        self.search = _open_search.get() if show is not False else None
        self.listener = listener or self.search
        if self.search is not None:
            self.visible, self.progress = self.search.visible, self.search.progress
        else:
            self.visible = sys.stderr.isatty() if show is None else show
            self.progress = _bars(visible=self.visible)
        self.task = self.progress.add_task(f"epoch 0/{epochs}", total=epochs * steps, info="", left="")
        self.done = self.images = 0
        self.start = clock()

    def __enter__(self) -> TrainingProgress:
        if self.search is None:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.search is None:
            self.progress.stop()
        else:
            self.progress.remove_task(self.task)

    def step(self, epoch: int, images: int, loss: Metric, accuracy: Metric) -> None:
        """One more batch of `images` is done; loss and accuracy are those of the epoch so far."""
        self.done += 1
        self.images += images
        if not self.visible and self.listener is None:
            return
        seconds = self.clock() - self.start
        total = self.epochs * self.steps
        before = epoch * self.steps + (self.done - 1) % self.steps + 1 - self.done  # by a run that was killed
        share = self.done / max(total - before, 1)
        if self.listener is not None:
            self.listener.trained(self.epochs - before / self.steps, share, seconds)
        if self.visible:
            rate = self.images / max(seconds, 1e-9)
            self.progress.update(
                self.task,
                completed=before + self.done,
                description=f"epoch {epoch + 1}/{self.epochs}",
                info=f"loss {loss.compute().item():.3f}  accuracy {accuracy.compute().item():.3f}  {rate:.0f} images/s",
                left=_left(seconds * (1 - share) / share) if share > 0 else "",
            )
