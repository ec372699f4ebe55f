"""Laws of runs: finished ones stay finished, failed ones are repeated, and none ends another."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joblib import cpu_count

from basisprune.callback import NullCallback
from basisprune.errors import ConfigError, DataError, MissingExtraError, TrainingError
from basisprune.sweeps.running import (
    Backbone,
    Failure,
    Resources,
    Run,
    Running,
    _in_processes,
    open_pool,
    require_ray,
    run_all,
    slug,
)

needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")


def run(folder: Path | str, name: str = "a") -> Run:
    return Run(name, "compress", Path(folder) / name, Backbone("resnet18"), "data", {"max_drop": 0.01})


def test_a_run_survives_its_file(tmp_path):
    options = {"max_drop": 0.01, "recipe": {"base": "quick", "train": {"epochs": 3}}, "onnx": None}
    best = Backbone("resnet50", weights="w.safetensors", cached=True)
    one = Run(
        "a", "search", Path("here"), Backbone("resnet18"), "data", options, Path("root"), 2, best, (("factory", "a:b"),)
    )
    one.write(tmp_path / "a.run")
    assert Run.read(tmp_path / "a.run") == one


@given(st.text(max_size=200))
def test_a_name_becomes_that_of_a_folder(name):
    assert re.fullmatch(r"[A-Za-z0-9._+-]{0,100}", slug(name))
    assert slug(name) not in (".", "..")


def test_different_names_get_different_folders():
    names = ["a/b", "a-b", "a b", "a:b", "../a-b"]
    assert len({slug(name) for name in names}) == len(names)


def test_settings_that_are_wrong_stay_wrong():
    assert Failure.of(ConfigError("epochs: 0 given")) == Failure("epochs: 0 given", final=True)
    assert Failure.of(TrainingError("the loss is not finite")) == Failure("the loss is not finite", final=False)
    assert Failure.of(MemoryError("full")) == Failure("MemoryError: full", final=False)


class Work:
    """Fails this often with that error."""

    def __init__(self, **failures: tuple[int, Exception]) -> None:
        self.failures, self.calls = failures, []

    def __call__(self, one: Run) -> None:
        self.calls.append(one.name)
        times, error = self.failures.get(one.name, (0, RuntimeError()))
        if self.calls.count(one.name) <= times:
            raise error


def ran(work: Work, *names: str, retries: int = 2, done: tuple[str, ...] = ()):
    with open_pool(Running(), NullCallback(), work) as pool:
        runs = [run("folder", name) for name in names]
        return run_all(runs, pool, retries, NullCallback(), done=lambda one: one.name in done)


def test_what_is_done_is_not_run():
    work = Work()
    results = ran(work, "a", "b", done=("a",))
    assert work.calls == ["b"]
    assert [(each.run.name, each.failure, each.attempts) for each in results] == [("a", None, 0), ("b", None, 1)]


def test_what_fails_is_repeated_after_the_others():
    work = Work(a=(2, RuntimeError("the disk")))
    results = ran(work, "a", "b")
    assert work.calls == ["a", "b", "a", "a"]
    assert [(each.failure, each.attempts) for each in results] == [(None, 3), (None, 1)]


def test_what_fails_every_time_is_recorded_and_does_not_stop_the_others():
    work = Work(a=(9, RuntimeError("the disk")))
    first, second = ran(work, "a", "b", retries=1)
    assert (first.failure.error, first.attempts) == ("RuntimeError: the disk", 2)
    assert second.failure is None


def test_wrong_data_is_not_tried_again():
    work = Work(a=(9, DataError("no images")))
    (result,) = ran(work, "a")
    assert (result.failure.error, result.failure.final, result.attempts) == ("no images", True, 1)


def test_ctrl_c_is_not_a_failure_of_the_run_in_this_process():
    with pytest.raises(KeyboardInterrupt):
        ran(Work(a=(1, KeyboardInterrupt())), "a")


def test_cores_are_divided_unless_they_are_asked_for():
    assert Running(jobs=1).threads == cpu_count()
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


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Lets a script of the shell stand in for the worker."""

    def replaced(script: str) -> None:
        path = tmp_path / "worker.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr("basisprune.sweeps.running.sys.executable", str(path))

    return replaced


def failure_of(one: Run, running: Running | None = None) -> Failure | None:
    with _in_processes((running or Running()).threads) as do:
        return do(one)


@needs_shell
def test_a_process_that_ends_well_has_done_its_run(worker, tmp_path):
    worker('echo "$OMP_NUM_THREADS threads, $2 $4"')
    one = run(tmp_path)
    assert failure_of(one, Running(resources=Resources(cpus=3))) is None
    assert one.log.read_text() == "3 threads, basisprune.sweeps.worker 3\n"
    assert Run.read(one.beside("run")) == one


@needs_shell
def test_a_process_that_is_killed_has_failed_and_ends_no_other(worker, tmp_path):
    worker('case "$3" in *b.run) kill -9 $$;; *) sleep 1;; esac')
    with open_pool(Running(jobs=2), NullCallback()) as pool:
        failures = {one.name: failure for one, failure in pool([run(tmp_path, name) for name in "abc"])}
    assert (failures["a"], failures["c"]) == (None, None)
    assert "was killed by signal 9" in failures["b"].error
    assert not failures["b"].final


@needs_shell
def test_a_process_says_why_it_failed_and_an_old_reason_is_forgotten(worker, tmp_path):
    one = run(tmp_path)
    Failure("no images", final=True).write(tmp_path / "said")
    worker(f"cp {tmp_path / 'said'} {one.beside('failed')}; exit 1")
    assert failure_of(one) == Failure("no images", final=True)
    worker("exit 7")
    assert "ended with exit code 7" in failure_of(one).error


def started(pool, runs: list[Run]) -> threading.Thread:
    """A thread that does the runs, once all their processes have started."""
    thread = threading.Thread(target=lambda: list(pool(runs)))
    thread.start()
    while not all(one.log.exists() and one.log.read_text() for one in runs):
        thread.join(0.01)
    return thread


@needs_shell
def test_processes_end_with_their_pool_and_no_more_are_started(worker, tmp_path):
    worker("echo begun; exec sleep 600")
    with open_pool(Running(jobs=2), NullCallback()) as pool:
        thread = started(pool, [run(tmp_path, "a"), run(tmp_path, "b")])
    thread.join(60)
    assert not thread.is_alive()
    with _in_processes(1) as do:
        pass
    assert do(run(tmp_path)) == Failure("stopped before it began")


@needs_shell
def test_a_worker_notices_that_its_parent_ended(worker, tmp_path, monkeypatch):
    worker("echo begun; cat > /dev/null")  # reads until the pipe is closed
    processes: list[subprocess.Popen] = []
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **more: processes.append(start(*args, **more)) or processes[-1]
    )
    with _in_processes(1) as do:
        thread = started(lambda runs: map(do, runs), [run(tmp_path)])
        (process,) = processes
        assert process.poll() is None
        process.stdin.close()
        thread.join(60)
        assert process.returncode == 0


@needs_shell
def test_images_are_fetched_once_before_two_processes_want_them(worker, tmp_path, monkeypatch):
    worker("true")
    fetched: list[str] = []

    def fetch(name: str) -> None:
        fetched.append(name)
        raise DataError("not available")

    monkeypatch.setattr("basisprune.sweeps.running.fetch", fetch)
    with open_pool(Running(jobs=2), NullCallback()) as pool:
        assert [failure for _, failure in pool([run(tmp_path, "a"), run(tmp_path, "b")])] == [None, None]
    assert fetched == ["data"]


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"basisprune\[ray\]"):
        require_ray()


def test_an_address_without_a_cluster_is_refused(monkeypatch):
    ray = pytest.importorskip("ray")

    def nobody(**_options):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", nobody)
    with (
        pytest.raises(ConfigError, match="ray_address: 'auto' given; no Ray cluster answers there"),
        open_pool(Running(ray_address="auto"), NullCallback()),
    ):
        pass
