"""Laws that every subcommand keeps: settings from a file, errors and exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
import yaml
from commands import invoke
from typer.testing import CliRunner

import basisprune
import basisprune.demo
from basisprune.cli.common import Commands
from basisprune.errors import MissingExtraError


def test_all_faults_of_a_file_are_told_at_once(tmp_path):
    bad = {"modell": "x", "max_drop": "lots", "epochs": "three", "pretrained": 7}
    bad |= {"recipe": {"train": {"epoch": 3, "lr": "fast"}}, "search": {"framewrk": "basis"}}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad))
    result = invoke("compress", "--config", tmp_path / "bad.yaml")
    assert result.exit_code == 1
    assert "7 faults" in result.stderr
    for hint in ("'model'", "percentage", "a whole number", "true or false", "'epochs'", "a number", "'framework'"):
        assert hint in result.stderr


@pytest.mark.parametrize("text", ["- a list", "model: [", "just text"])
def test_a_file_that_is_no_configuration_is_refused(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    result = invoke("compress", "--config", tmp_path / "bad.yaml")
    assert (result.exit_code, "bad.yaml" in result.stderr) == (1, True)


def test_a_file_names_options_as_they_are_typed(compressed, photos, tmp_path):
    folder, _ = compressed
    image = photos / "blue" / "2.png"
    (tmp_path / "json.yaml").write_text("json: true\ntop: 2\n")
    shown = invoke("predict", folder, image, "--config", tmp_path / "json.yaml")
    assert len(json.loads(shown.stdout)[0]["classes"]) == 2
    (tmp_path / "csv.yaml").write_text("csv: true\n")
    assert invoke("predict", folder, image, "--config", tmp_path / "csv.yaml").stdout.startswith("file,class")
    (tmp_path / "bad.yaml").write_text("as_json: true\nhelp: true\n")
    assert "2 faults" in invoke("predict", folder, image, "--config", tmp_path / "bad.yaml").stderr


def test_an_error_is_told_without_a_traceback(tiny_demo, tmp_path, monkeypatch):
    def missing(**_settings):
        raise MissingExtraError("mlxtend", extra="demo")

    monkeypatch.setattr(basisprune.demo, "demo_data", missing)
    result = invoke("demo", "--output", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "basisprune[demo]" in result.stderr


def test_ctrl_c_is_an_exit_code(tiny_demo, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(basisprune.demo, "demo_data", stop)
    result = invoke("demo", "--output", tmp_path)
    assert (result.exit_code, "again to resume" in result.stderr) == (130, True)


# ------------------------------------------------------------------------------- what the system says


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "out/x"),
            "out/x: No space left on device; free some space, and",
        ),
        (OSError(errno.EISDIR, "Is a directory", ".partial-1", None, "out/report.html"), "out/report.html: Is a dir"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; use another folder"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "out: Permission denied; ask for permission"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError("something else"), "something else; see to that"),
        (MemoryError(), "there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "there is not enough memory"),
        (RuntimeError("could not create a primitive"), "there is not enough memory"),
        (RuntimeError("std::bad_alloc"), "there is not enough memory"),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried"), "there is not enough mem"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to alloc"), "there is not enough memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "there is not enough memory"),
        (RuntimeError("Too many open files. Communication with the workers is no longer possible."), "ulimit -n"),
        (
            OSError(
                "Caught OSError in worker process 0.\nOriginal T\nOSError: [Errno 24] Too many open files: 'a.png'"
            ),
            "error: Too many open files: 'a.png'; allow more open files (ulimit -n)",
        ),
        (SystemExit(0), "code that is not basisprune's ended the program, with exit code 0"),
    ],
)
def test_what_the_system_says_is_a_message_and_an_exit_code(error, said, tiny_demo, tmp_path, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(basisprune.demo, "demo_data", fail)
    result = invoke("demo", "--output", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_fault_of_ours_is_not_hidden(tiny_demo, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(basisprune.demo, "demo_data", fail)
    assert str(invoke("demo", "--output", tmp_path).exception) == "a bug"


IMPATIENT = """
import os, signal, time, typer
from basisprune.cli.common import Commands

app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

@app.callback()
def main() -> None: ...

@app.command()
def wait() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    finally:
        import atexit
        atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(3)])

@app.command()
def talk() -> None:
    typer.echo("x" * 100_000)

@app.command()
def write() -> None:
    with open("file", "w") as file:
        os.write(2, b"error\\n")
        os.write(1, b"output\\n")
        file.write(str(file.fileno()))

app()
"""


def words(*given: str, shell: str = "", folder: Path) -> subprocess.CompletedProcess[str]:
    """What a process does that has the commands of IMPATIENT, its streams as a shell has them.

    It callback Ctrl-C even where the tests run in the background of a shell, which makes programs deaf to it.
    """
    (folder / "program.py").write_text(IMPATIENT.replace("\\\\", "\\"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(basisprune.__file__).parents[1]), *sys.path])}
    line = f'"{sys.executable}" program.py {" ".join(given)} {shell}'
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_again_and_again_ends_in_order(tmp_path):
    done = words("wait", folder=tmp_path)
    assert (done.returncode, done.stderr) == (130, "stopped; run the same command again to resume\n")


def test_a_full_output_is_an_error(tmp_path):
    done = words("talk", shell="> /dev/full", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device; free some space")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nobody_who_listens_is_no_traceback(tmp_path):
    done = words("talk", shell="| head -c 1", folder=tmp_path)
    assert done.stderr == ""


@pytest.mark.parametrize("closed", ["2>&-", "1>&-", "0<&-", "1>&- 2>&- 0<&-"])
def test_what_is_said_to_a_closed_stream_does_not_get_into_a_file(closed, tmp_path):
    assert words("write", shell=closed, folder=tmp_path).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


def test_a_run_does_not_end_because_nobody_can_hear_of_it(tmp_path):
    assert words("talk", shell="2> /dev/full", folder=tmp_path).returncode == 0


STRANGE = (
    "model: dire:f",
    "data: dire:f",
    "task: dire:f",
    "models: [dire:f]",
    "model: resnet18\ntrust_code: true",
    "ray_address: x",
)


@pytest.mark.parametrize("command", [("compress",), ("compress", "--dry-run"), ("train",)])
@pytest.mark.parametrize("text", STRANGE)
def test_a_file_of_settings_runs_no_code(text, command, photos, tmp_path, monkeypatch):
    (tmp_path / "dire.py").write_text("from pathlib import Path\nPath('ran').touch()\nf = 1\n")
    (tmp_path / "odd.yaml").write_text(text + ("" if "data:" in text else f"\ndata: {photos}") + "\nsize: 16\n")
    monkeypatch.chdir(tmp_path)
    more = () if "model" in text else ("--model", "resnet18", "--no-pretrained")
    done = invoke(*command, "--config", "odd.yaml", "--output", "out", *more)
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"dire.py", "odd.yaml"}
    if "dire" in text and not (command == ("train",) and ("task" in text or "models" in text)):
        assert "'dire:f' was read from a file" in done.stderr


@pytest.mark.parametrize("more", [("--trust-code",), ("--model", "tiny:tiny_backbone")])
def test_code_in_a_file_is_run_for_those_who_trust_it_or_type_its_name(more, photos, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"model: tiny:tiny_backbone\ndata: {photos}\nsize: 16\n")
    words = ("compress", "--config", tmp_path / "mine.yaml", "--output", tmp_path / "out", "--dry-run")
    assert invoke(*words).exit_code == 1
    assert invoke(*words, *more).exit_code == 0
    assert invoke(*words).exit_code == 1  # for that command only


def test_settings_of_a_stranger_are_read_in_no_time(tmp_path):
    for text in (
        "a: &a {x: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [*a, *a]}}\n" for n in range(30)),
        "".join(f"k{n}: 1\n" for n in range(100_000)),
        "seed: 1" + ":1" * 400_000,
        "model: " + "[" * 900_000,
        "".join(f"option{n}: 1\n" for n in range(9_000)),
    ):
        (tmp_path / "odd.yaml").write_text(text)
        begin = time.process_time()
        assert invoke("compress", "--config", tmp_path / "odd.yaml").exit_code == 1
        assert time.process_time() - begin < 8


def test_what_libraries_log_of_a_file_cannot_steer_the_terminal():
    code = (
        "import logging; from basisprune.cli.common import _Escaping; logging.basicConfig(handlers=[_Escaping()]); "
        "logging.getLogger('timm').warning('unexpected keys (%s)', '\\x1b[2J\\x07')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "\x1b" not in run.stderr
    assert "\x07" not in run.stderr
    assert "unexpected keys (\\x1b[2J\\x07)" in run.stderr


@pytest.mark.parametrize("before", [None, "1"])
def test_a_python_that_a_library_starts_imports_nothing_of_the_current_folder(before, tmp_path, monkeypatch):
    (tmp_path / "strange.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    app, codes = typer.Typer(cls=Commands), []

    @app.command()
    def start() -> None:
        codes.append(subprocess.run([sys.executable, "-c", "import strange"], stderr=subprocess.DEVNULL).returncode)

    @app.command()
    def other() -> None:
        pass

    CliRunner().invoke(app, ["start"])
    after = subprocess.run([sys.executable, "-c", "import strange"], stderr=subprocess.DEVNULL).returncode
    assert (codes, after) == ([1], 1 if before else 0)
