"""Laws of the places where cells run on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from basisprune.errors import DataError
from basisprune.files import write_checked
from basisprune.sweeps.cells import Backbone, Cell, Failure, read_cell
from basisprune.sweeps.pools import Here, Processes, files
from basisprune.sweeps.running import Resources, Running, closing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")


def cell(folder: Path, name: str = "a") -> Cell:
    return Cell(name, "compress", Backbone("resnet18", str(folder / name)), "data", {"max_drop": 0.01})


@pytest.fixture
def instead_of_python(tmp_path, monkeypatch):
    """Lets a script of the shell stand in for the worker."""

    def replaced(script: str) -> None:
        path = tmp_path / "worker.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr("basisprune.sweeps.pools.sys.executable", str(path))

    return replaced


def ended(one: Cell, running: Running | None = None) -> Failure | None:
    with closing(Processes(running or Running())) as pool:
        pool.start(one)
        assert not pool.has_room
        done, failure = pool.ended()
        assert done == one
        assert pool.has_room
    return failure


def test_a_process_that_ends_well_has_done_its_cell(instead_of_python, tmp_path):
    instead_of_python('echo "$OMP_NUM_THREADS threads, $2 $4"')
    one = cell(tmp_path)
    assert ended(one, Running(resources=Resources(cpus=3))) is None
    assert one.log.read_text() == "3 threads, basisprune.sweeps.worker 3\n"
    assert read_cell(files(one)[0]) == one


def test_a_process_that_is_killed_has_failed_and_may_be_tried_again(instead_of_python, tmp_path):
    instead_of_python("kill -9 $$")
    failure = ended(cell(tmp_path))
    assert "was killed by signal 9" in failure.error
    assert not failure.final


def test_a_process_says_why_it_failed_and_an_old_reason_is_forgotten(instead_of_python, tmp_path):
    one = cell(tmp_path)
    write_checked(tmp_path / "said", Failure("no images", final=True).to_json().encode())
    instead_of_python(f"cp {tmp_path / 'said'} {files(one)[1]}; exit 1")
    assert ended(one) == Failure("no images", final=True)
    instead_of_python("exit 7")
    assert "ended with exit code 7" in ended(one).error


def test_what_runs_is_ended_with_the_pool(instead_of_python, tmp_path):
    instead_of_python("exec sleep 600")
    pool = Processes(Running(jobs=2))
    pool.start(cell(tmp_path))
    pool.start(cell(tmp_path, "b"))
    processes = [process for _, process in pool._at_work]
    pool.close()
    assert all(process.returncode is not None for process in processes)


def test_a_worker_hears_when_whoever_started_it_is_gone(instead_of_python, tmp_path):
    instead_of_python("cat > /dev/null")  # reads until the pipe is closed
    pool = Processes(Running())
    pool.start(cell(tmp_path))
    ((_, process),) = pool._at_work
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == 0
    pool.close()


def test_ctrl_c_is_not_a_failure_of_the_cell_that_runs_here(tmp_path):
    def interrupted(_cell: Cell) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Here(interrupted).start(cell(tmp_path))


def test_images_are_fetched_once_before_two_processes_want_them(instead_of_python, tmp_path, monkeypatch):
    instead_of_python("true")
    fetched: list[str] = []

    def fetch(name: str) -> None:
        fetched.append(name)
        raise DataError("not to be had")

    monkeypatch.setattr("basisprune.sweeps.pools.fetch", fetch)
    with closing(Processes(Running(jobs=2))) as pool:
        for name in ("a", "b"):
            pool.start(cell(tmp_path, name))
        assert [pool.ended()[1] for _ in range(2)] == [None, None]
    assert fetched == ["data"]
