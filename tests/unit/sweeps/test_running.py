"""Laws of running cells: what is done stays done, what fails is tried again, and nobody waits for the hopeless."""

from __future__ import annotations

import pytest

from basisprune.errors import ConfigError, DataError
from basisprune.listener import Silence
from basisprune.sweeps.cells import Backbone, Cell
from basisprune.sweeps.file import Sweep
from basisprune.sweeps.pools import Here
from basisprune.sweeps.running import Resources, Running, cores, run_cells
from basisprune.sweeps.sweep import run_sweep
from basisprune.torchkit.processes import Processes


def cell(name: str) -> Cell:
    return Cell(name, "compress", Backbone(name, f"folder/{name}"), "data")


class Work:
    """Fails as often as it is told, with that error."""

    def __init__(self, **failures: tuple[int, Exception]) -> None:
        self.failures, self.calls = failures, []

    def __call__(self, one: Cell) -> None:
        self.calls.append(one.name)
        times, error = self.failures.get(one.name, (0, RuntimeError()))
        if self.calls.count(one.name) <= times:
            raise error


def ran(work: Work, *names: str, retries: int = 2, done: tuple[str, ...] = ()):
    cells = [cell(name) for name in names]
    return run_cells(cells, Here(work), retries, Silence(), done=lambda one: one.name in done)


def test_what_is_done_is_not_run():
    work = Work()
    outcomes = ran(work, "a", "b", done=("a",))
    assert work.calls == ["b"]
    assert [(each.cell.name, each.failure, each.attempts) for each in outcomes] == [("a", None, 0), ("b", None, 1)]


def test_what_fails_is_tried_again_after_the_others():
    work = Work(a=(2, RuntimeError("the disk")))
    outcomes = ran(work, "a", "b")
    assert work.calls == ["a", "b", "a", "a"]
    assert [(each.failure, each.attempts) for each in outcomes] == [(None, 3), (None, 1)]


def test_what_fails_for_good_is_recorded_and_does_not_stop_the_others():
    work = Work(a=(9, RuntimeError("the disk")))
    first, second = ran(work, "a", "b", retries=1)
    assert (first.failure.error, first.attempts) == ("RuntimeError: the disk", 2)
    assert second.failure is None


def test_wrong_data_is_not_tried_again():
    work = Work(a=(9, DataError("no images")))
    (outcome,) = ran(work, "a")
    assert (outcome.failure.error, outcome.failure.final, outcome.attempts) == ("no images", True, 1)


def test_cores_are_divided_unless_they_are_asked_for():
    assert Running(jobs=1).threads == cores()
    assert Running(jobs=10_000).threads == 1
    assert Running(jobs=4, resources=Resources(cpus=3)).threads == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Running(jobs=0), "jobs: 0 given"),
        (lambda: Running(retries=-1), "retries: -1 given"),
        (lambda: Resources(cpus=0), "cpus: 0 given"),
        (lambda: Resources(gpus=1.5), "gpus: 1.5 given"),
        (lambda: Resources(memory=0), "memory: 0 given"),
    ],
)
def test_impossible_numbers_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_launcher_of_several_processes_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("basisprune.sweeps.running.Processes.joined", lambda: Processes(0, 2))
    sweep = Sweep({}, Resources(), 0, tmp_path / "out")
    with pytest.raises(ConfigError, match="started in several processes; start one, without a launcher"):
        run_sweep(sweep)
    assert not (tmp_path / "out").exists()
