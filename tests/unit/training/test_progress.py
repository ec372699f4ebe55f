"""Laws of progress: what it says of the time left, and where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torchmetrics import MeanMetric

from basisprune.listener import Silence
from basisprune.training.progress import SearchProgress, TrainingProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def metric() -> MeanMetric:
    value = MeanMetric()
    value.update(torch.tensor(0.5))
    return value


def test_the_time_left_is_what_the_last_candidates_took_times_those_expected():
    clock, lines = Clock(), []
    with SearchProgress(5, 2, lines.append, show=False, clock=clock) as search:
        assert search.left() is None
        for seconds in (100, 10, 20):  # the first one is the unpruned network
            clock.now += seconds
            search.judged(SimpleNamespace(summary="judged"))
        assert search.left() == pytest.approx(2 * 15)
    assert lines == ["judged", "judged; about 30 s left", "judged; about 30 s left"]


def test_a_training_under_way_counts_before_any_candidate_is_done():
    clock = Clock()
    with SearchProgress(3, 2, lambda _: None, show=False, clock=clock) as search:
        bar = TrainingProgress(4, 5, clock=clock)
        with bar:
            clock.now = 10.0
            for step in range(10):
                bar.step(step // 5, 8, metric(), metric())
        # Half of four passes took ten seconds; two candidates of two passes each are to come.
        assert search.left() == pytest.approx(10 + 2 * 2 * 5)


def test_more_candidates_than_expected_leave_nothing():
    clock = Clock()
    with SearchProgress(1, 2, lambda _: None, show=False, clock=clock) as search:
        for _ in range(3):
            clock.now += 1
            search.judged(SimpleNamespace(summary="judged"))
        assert search.left() == 0


def test_in_a_terminal_lines_and_bars_are_drawn(capsys):
    with SearchProgress(2, 1, lambda _: pytest.fail("not a line"), show=True) as search:
        search.say("scoring [brackets]")
        with TrainingProgress(1, 1) as bar:
            bar.step(0, 8, metric(), metric())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "scoring [brackets]" in shown.err
    assert "search" in shown.err


def test_a_training_that_shall_not_be_seen_is_no_part_of_a_search():
    with SearchProgress(2, 1, lambda _: None, show=False) as search:
        assert TrainingProgress(1, 1, show=False).search is None
        assert TrainingProgress(1, 1).search is search
    assert TrainingProgress(1, 1).search is None


def test_a_listener_hears_how_far_a_training_is_whether_it_is_seen_or_not():
    class Ears(Silence):
        heard: ClassVar[list[tuple[float, float, float]]] = []

        def trained(self, epochs: float, share: float, seconds: float) -> None:
            self.heard.append((epochs, share, seconds))

    clock = Clock()
    with TrainingProgress(2, 2, Ears(), show=False, clock=clock) as bar:
        for step in range(4):
            clock.now += 3
            bar.step(step // 2, 8, metric(), metric())
    assert Ears.heard == [(2, 0.25, 3), (2, 0.5, 6), (2, 0.75, 9), (2, 1, 12)]
