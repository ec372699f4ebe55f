"""Laws of progress: what it says of the time left, and where."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from basisprune.callback import NullCallback, TrainingStep
from basisprune.training.progress import SearchProgress, TrainingClock, callback_or_bar, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Notes(NullCallback):
    def __init__(self) -> None:
        self.steps: list[TrainingStep] = []

    def trained(self, step: TrainingStep) -> None:
        self.steps.append(step)


@dataclass(frozen=True)
class Judged:
    summary: str = "judged"


def test_the_time_left_is_what_the_last_candidates_took_times_those_expected():
    clock, lines = Clock(), []
    with SearchProgress(5, 2, lines.append, show=False, clock=clock) as search:
        assert search.left() is None
        for seconds in (100, 10, 20):  # the first one is the unpruned network
            clock.now += seconds
            search.judged(Judged())
        assert search.left() == pytest.approx(2 * 15)
    assert lines == ["judged", "judged; about 30 s left", "judged; about 30 s left"]


def test_a_training_under_way_counts_before_any_candidate_is_done():
    clock = Clock()
    with SearchProgress(3, 2, lambda _: None, show=False, clock=clock) as search:
        training = TrainingClock(4, 5, search, clock=clock)
        clock.now = 10.0
        for step in range(10):
            training.step(step // 5, 8, 0.5, 0.5)
        # Half of four passes took ten seconds; two candidates of two passes each are to come.
        assert search.left() == pytest.approx(10 + 2 * 2 * 5)


def test_more_candidates_than_expected_leave_nothing():
    clock = Clock()
    with SearchProgress(1, 2, lambda _: None, show=False, clock=clock) as search:
        for _ in range(3):
            clock.now += 1
            search.judged(Judged())
        assert search.left() == 0


def test_in_a_terminal_lines_and_bars_are_drawn(capsys):
    with SearchProgress(2, 1, lambda _: pytest.fail("not a line"), show=True) as search:
        search.log("scoring [brackets]")
        for _ in range(2):  # the bar of one training follows that of the other
            TrainingClock(1, 1, search).step(0, 8, 0.5, 0.5)
        assert len(search.progress.tasks) == 2
        search.judged(Judged())
        assert len(search.progress.tasks) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "scoring [brackets]" in shown.err
    assert "search" in shown.err


def test_the_bar_of_images_that_are_opened_goes_when_all_are():
    with SearchProgress(2, 1, lambda _: pytest.fail("not a line"), show=True) as search:
        search.opened(256, 300)
        assert [(task.completed, task.total) for task in search.progress.tasks] == [(0, 2), (256, 300)]
        search.opened(300, 300)
        assert len(search.progress.tasks) == 1
    with SearchProgress(2, 1, lambda _: pytest.fail("not a line"), show=False) as search:
        search.opened(256, 300)
        assert len(search.progress.tasks) == 1


def test_a_listener_hears_of_a_training_instead_of_a_bar():
    notes = Notes()
    with callback_or_bar(notes, show=True) as callback:
        assert callback is notes
    with callback_or_bar(None, show=False) as callback:
        assert type(callback) is NullCallback


def test_a_training_that_was_resumed_counts_on_from_where_it_was():
    notes, clock = Notes(), Clock()
    training = TrainingClock(4, 5, notes, clock=clock)
    for epoch in (2, 3):
        for _ in range(5):
            clock.now += 1
            training.step(epoch, 8, 0.5, 0.25)
    assert [step.done for step in notes.steps] == list(range(11, 21))
    last = notes.steps[-1]
    assert (last.steps, last.share, last.epochs_here, last.seconds, last.images) == (20, 1.0, 2.0, 10.0, 80)
    assert notes.steps[4].share == 0.5
    assert (last.loss, last.accuracy) == (0.5, 0.25)


@pytest.mark.parametrize(("seconds", "said"), [(4, "4 s"), (89, "90 s"), (91, "2 min"), (3600, "1 h 0 min")])
def test_a_duration_is_said_as_people_do(seconds, said):
    assert duration(seconds) == said
