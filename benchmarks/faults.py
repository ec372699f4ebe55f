"""What becomes of a run that is killed, or that the system fails, at any of its file operations.

    python benchmarks/faults.py [--kinds kill,full,...] [--every 1]

A small run of `basisprune compress` is done once undisturbed, while an audit hook counts its file operations in the
output folder and in the data. Then it is done again and again in processes of their own, each with one fault:

kill, term       SIGKILL or SIGTERM right before the N-th operation
full, read-only  from the N-th operation on, all that would write is refused as by a full or a read-only disk
denied           the N-th operation is refused for want of permission
short            from the N-th operation on, no file can grow beyond 600 bytes, so that writing stops half-way
flip             one bit of one file that a resumed run or `predict` reads is turned over

A fault strikes a new folder ("new") or one with a finished result and a note of the user ("again"), which must hold a
whole result at every moment. Afterwards the same command runs undisturbed, and its answer (all candidates, the chosen
one, and every weight) is compared with that of the undisturbed run. What was flipped may also be refused by its name,
as it must be where it cannot be made again. What takes time and touches no file, drawing figures and taking times, is
left out. Counts go to results/faults.json; it ends with exit code 1 unless nothing
was lost, different, silent or told by a traceback.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from common import write_result
from torch import nn

from basisprune.cli import app
from basisprune.deploy.bundle import load_bundle
from basisprune.deploy.latency import Latency, LatencyReport
from basisprune.errors import BasisPruneError
from basisprune.report import html
from basisprune.results import RunSummary
from basisprune.runs import deliver
from basisprune.runs import summary as summarising

KINDS = ("kill", "term", "full", "read-only", "denied", "short", "flip")
SCENES = ("new", "again")
OPERATIONS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"})
RECIPE = """
recipe:
  base: quick
  train: {epochs: 1, batch_size: 24}
  finetune: {epochs: 1, batch_size: 24}
  plan: {round_to: null}
  filter_plan: {round_to: null}
"""
FLIPS = 6  # in each file
GIVEN = frozenset({"recipe.yaml", "image.png", "notes.txt"})  # by the user, who may give anything else as well
TIMEOUT = 120


def backbone() -> nn.Module:
    """The network of the run, by a name that its command line can have."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
    )


def write_data(path: Path) -> None:
    """Writes images of three colours with noise."""
    rng = np.random.default_rng(0)
    parts: dict[str, np.typing.NDArray[np.generic]] = {}
    for part, count in (("train", 24), ("val", 12), ("test", 12)):
        labels = np.arange(count) % 3
        images = rng.integers(0, 120, (count, 16, 16, 3), dtype=np.uint8)
        images[np.arange(count), :, :, labels] += 120
        parts |= {f"x_{part}": images, f"y_{part}": labels}
    np.savez(path, **parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fault:
    """What happens at which file operation; for a flip, the number of the flip in a file."""

    kind: str
    scene: str
    place: int
    what: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault; `verdict` is same, refused or what is wrong."""

    fault: Fault
    code: int
    verdict: str
    said: str = ""


class Watch:
    """An audit hook for one process: counts file operations below a folder, and strikes at one of them."""

    def __init__(self, root: Path, fault: Fault | None, log: Path | None) -> None:
        self.root, self.fault, self.count, self.busy = str(root), fault, 0, False
        self.log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if event not in OPERATIONS or self.busy or not str(args[0]).startswith(self.root):
            return
        self.busy = True
        try:
            self.count += 1
            if self.log is not None:
                os.write(self.log, (json.dumps([event, str(args[0]), self._writes(event, args)]) + "\n").encode())
            if self.fault is not None and self.fault.kind != "flip":
                self._strike(self.fault, self._writes(event, args))
        finally:
            self.busy = False

    def _writes(self, event: str, args: tuple[object, ...]) -> bool:
        if event == "open":
            return bool(int(str(args[2])) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return event not in ("os.listdir", "os.scandir")

    def _strike(self, fault: Fault, writes: bool) -> None:
        if fault.kind == "denied" and self.count == fault.place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if self.count == fault.place and fault.kind in ("kill", "term"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
        if self.count == fault.place and fault.kind == "short":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        numbers = {"full": errno.ENOSPC, "read-only": errno.EROFS}
        if self.count >= fault.place and writes and fault.kind in numbers:
            number = numbers[fault.kind]
            raise OSError(number, os.strerror(number))


class Stage:
    """A folder with the data, the settings and the output of a run, and processes that work in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.output, self.said = root, root / "out", ""
        root.mkdir(exist_ok=True)
        write_data(root / "data.npz")
        (root / "recipe.yaml").write_text(RECIPE)

    @property
    def command(self) -> list[str]:
        ratios = ["--basis-ratio", "0.5", "--framework", "basis"]
        given = ["--model", "faults:backbone", "--data", str(self.root / "data.npz"), "--size", "16", "--no-onnx"]
        return ["compress", "--config", str(self.root / "recipe.yaml"), *given, *ratios, "--output", str(self.output)]

    def start(self, words: Sequence[str], fault: Fault | None = None, log: Path | None = None) -> int:
        """The exit code of a process that runs these words; negative for the signal that ended it."""
        out, into = os.pipe()  # not a file, whose size a fault may limit
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)  # so that nobody has to read it meanwhile
        process = os.fork()
        if process == 0:
            code = 70
            try:
                code = self._inside(words, into, fault, log)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        os.close(into)
        code = self._wait(process)
        with os.fdopen(out, "rb") as file:
            self.said = file.read().decode(errors="replace")
        return code

    def _wait(self, process: int) -> int:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return -999  # it hung

    def _inside(self, words: Sequence[str], into: int, fault: Fault | None, log: Path | None) -> int:
        os.dup2(into, 1), os.dup2(into, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        sys.argv = ["basisprune", *words]
        Watch(self.root, fault, log)
        try:
            app(words)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def answer(self) -> dict[str, object]:
        """What the run found; raises BasisPruneError for a result that is not whole."""
        summary = RunSummary.read(self.output / "summary.json")
        rows = [{**asdict(row), "latency_ms": 0} for row in summary.candidates]
        weights = hashlib.sha256((self.output / "model" / "model.safetensors").read_bytes()).hexdigest()
        load_bundle(self.output / "model")
        found = {"rows": rows, "weights": weights, "verdict": summary.verdict, "test": asdict(summary)["test"]}
        for side in ("before", "after"):
            found["test"][side]["latency_ms"] = 0
        return dict(json.loads(json.dumps(found)))

    def leftovers(self) -> list[str]:
        """What is in the folder that does not belong there."""
        return [path.name for path in self.output.rglob(".*")]


def finished(stage: Stage) -> None:
    """The output folder holds a finished result and something of the user's."""
    shutil.rmtree(stage.output, ignore_errors=True)
    shutil.copytree(stage.root.parent / "finished", stage.output)
    (stage.output / "model" / "notes.txt").write_text("mine")


def struck(stage: Stage, fault: Fault, expected: dict[str, object]) -> Outcome:
    """What becomes of a run with this fault, and of the same command afterwards."""
    shutil.rmtree(stage.output, ignore_errors=True)
    if fault.scene == "again":
        finished(stage)
    code = stage.start(stage.command, fault)
    said = stage.said
    wrong = _wrong_at_once(stage, fault, code, said)
    if not wrong:
        again = stage.start(stage.command)
        wrong = _wrong_afterwards(stage, fault, again, expected)
        said = stage.said if wrong else said
    return Outcome(fault, code, wrong or "same", said[-1500:] if wrong else "")


def _wrong_at_once(stage: Stage, fault: Fault, code: int, said: str) -> str:
    killed = {"kill": -signal.SIGKILL, "term": -signal.SIGTERM}
    if code not in ({killed[fault.kind], 0} if fault.kind in killed else {0, 1}):
        return "hangs" if code == -999 else f"exit code {code}"
    if "Traceback" in said:
        return "a traceback"
    if code == 1 and "error: " not in said:
        return "no message"
    if fault.scene == "again":
        try:
            load_bundle(stage.output / "model")
        except BasisPruneError:
            return "the old result is lost"
    return ""


def _wrong_afterwards(stage: Stage, fault: Fault, code: int, expected: dict[str, object]) -> str:
    if code != 0:
        return f"the next run ends with {code}"
    try:
        if stage.answer() != expected:
            return "another answer"
    except (BasisPruneError, OSError) as error:
        return f"no answer: {error}"
    if fault.scene == "again" and (stage.output / "model" / "notes.txt").read_text() != "mine":
        return "a file of the user is lost"
    return f"leftovers: {stage.leftovers()}" if stage.leftovers() else ""


# ------------------------------------------------------------------------------------------------- flipped bits


def flipped(stage: Stage, fault: Fault, expected: dict[str, object], words: Sequence[str], usual: str) -> Outcome:
    """What becomes of a bit that is turned over in a file, for a run that resumes or for `predict`."""
    finished(stage)
    write_data(stage.root / "data.npz")
    path = stage.root / fault.what
    content = bytearray(path.read_bytes())
    chance = random.Random(f"{fault.what} {fault.place}")
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    code = stage.start(words)
    said = stage.said
    if "Traceback" in said or code not in (0, 1):
        return Outcome(fault, code, "a traceback" if code != -999 else "hangs", said[-1500:])
    if code == 1:
        is_named = Path(fault.what).name in said
        return Outcome(fault, code, "refused" if is_named else "refused without its name", "" if is_named else said)
    if words[0] == "predict":
        return Outcome(fault, code, "same" if said == usual else "another answer", "" if said == usual else said)
    wrong = _wrong_afterwards(stage, fault, code, expected)
    return Outcome(fault, code, wrong or "same", said[-1500:] if wrong else "")


def flips(stage: Stage, words: Sequence[str], kind: str) -> Iterator[Fault]:
    """A fault for each of a few bits of every file that these words read."""
    finished(stage)
    log = stage.root.parent / "reads.jsonl"
    log.unlink(missing_ok=True)
    assert stage.start(words, log=log) == 0, stage.said
    events = [json.loads(line) for line in log.read_text().splitlines()]
    read = dict.fromkeys(
        path for event, path, writes in events if event == "open" and not writes and Path(path).is_file()
    )
    finished(stage)
    for path in read:
        if Path(path).is_file() and Path(path).name not in GIVEN:
            for place in range(FLIPS):
                yield Fault("flip", kind, place, str(Path(path).relative_to(stage.root)))


# ------------------------------------------------------------------------------------------------- all of them


def warm_up(stage: Stage) -> None:
    """Imports what a run imports on its way, so that the processes need not; torch itself does not work here yet."""
    log = stage.root.parent / "modules.json"
    process = os.fork()
    if process == 0:
        before = set(sys.modules)
        code = stage._inside(stage.command, os.open(os.devnull, os.O_WRONLY), None, None)
        log.write_text(json.dumps(sorted(set(sys.modules) - before)))
        os._exit(code)
    assert os.waitpid(process, 0)[1] == 0
    for name in json.loads(log.read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    page = html.render_report(RunSummary.read(stage.output / "summary.json"))
    for module, name, work in (
        (html, "render_report", lambda _summary: page),
        (deliver, "measure_latency", no_latency),
        (summarising, "measure_latency", no_latency),
    ):
        setattr(module, name, work)


def no_latency(
    models: Mapping[str, nn.Module], shape: Sequence[int], *, batch_sizes: Sequence[int], **_: object
) -> LatencyReport:
    """A report as `measure_latency` gives, without measuring anything."""
    rows = (Latency(name, "eager", size, 1.0, 0.0, 1.0) for size in batch_sizes for name in models)
    return LatencyReport(tuple(rows), tuple(shape), 1, 2, "none")


def operations(stage: Stage, scene: str) -> int:
    """How many file operations an undisturbed run has."""
    shutil.rmtree(stage.output, ignore_errors=True)
    if scene == "again":
        finished(stage)
    log = stage.root.parent / f"{scene}.jsonl"
    log.unlink(missing_ok=True)
    assert stage.start(stage.command, log=log) == 0, stage.said
    return len(log.read_text().splitlines())


def all_faults(stage: Stage, kinds: Sequence[str], every: int) -> tuple[list[Fault], dict[str, int]]:
    counts = {scene: operations(stage, scene) for scene in SCENES}
    faults = [
        Fault(kind, scene, place)
        for scene, count in counts.items()
        for kind in kinds
        if kind != "flip"
        for place in range(1, count + 1, every)
    ]
    return faults, counts


def run_all(root: Path, kinds: Sequence[str], every: int) -> list[Outcome]:
    """What became of every fault; results are written on the way, too."""
    stage = Stage(root / "work")
    warm_up(stage)
    assert stage.start(stage.command) == 0, stage.said
    expected = stage.answer()
    shutil.copytree(stage.output, root / "finished")
    faults, counts = all_faults(stage, kinds, every)
    print(f"{counts} file operations, {len(faults)} faults at them", flush=True)
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if is_wrong(outcome):
            print(f"WRONG {outcome}", flush=True)
        if len(outcomes) % 20 == 0:
            write(outcomes, counts, kinds, every)
            print(f"{len(outcomes)} faults, last {outcome.fault}", flush=True)

    if "flip" in kinds:
        image = stage.root / "image.png"
        _write_image(image)
        predict = ["predict", str(stage.output), str(image)]
        for kind, words in (("resume", stage.command), ("predict", predict)):
            chosen = list(flips(stage, words, kind))
            assert stage.start(words) == 0
            usual = stage.said
            for fault in chosen:
                _write_image(image)
                note(flipped(stage, fault, expected, words, usual))
        write_data(stage.root / "data.npz")
    random.Random(0).shuffle(faults)
    for fault in faults:
        note(struck(stage, fault, expected))
    print(json.dumps(write(outcomes, counts, kinds, every), indent=1))
    return outcomes


def _write_image(path: Path) -> None:
    image = importlib.import_module("PIL.Image")
    image.fromarray(np.full((16, 16, 3), (200, 30, 30), dtype=np.uint8)).save(path)


def counted(outcomes: Sequence[Outcome], by: Callable[[Outcome], str]) -> dict[str, dict[str, int]]:
    found: dict[str, collections.Counter[str]] = {}
    for outcome in outcomes:
        found.setdefault(by(outcome), collections.Counter())[outcome.verdict] += 1
    return {name: dict(counts) for name, counts in sorted(found.items())}


def write(outcomes: Sequence[Outcome], counts: dict[str, int], kinds: Sequence[str], every: int) -> dict[str, object]:
    """The counts, which are also written to the file of results."""
    wrong = [asdict(outcome) for outcome in outcomes if is_wrong(outcome)]
    flips = [outcome for outcome in outcomes if outcome.fault.kind == "flip"]
    results = {
        "operations": counts,
        "faults": len(outcomes),
        "wrong": len(wrong),
        "by kind": counted(outcomes, lambda outcome: f"{outcome.fault.kind}, {outcome.fault.scene}"),
        "flipped files": counted(flips, lambda outcome: f"{outcome.fault.scene}: {outcome.fault.what}"),
        "first wrong": wrong[:20],
    }
    write_result("faults", {"kinds": list(kinds), "every": every, "flips": FLIPS}, results)
    return results


def is_wrong(outcome: Outcome) -> bool:
    return outcome.verdict not in ("same", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--every", type=int, default=1, help="take only every so many operations")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_all(Path(folder).resolve(), kinds, options.every)
    sys.exit(any(map(is_wrong, outcomes)))


if __name__ == "__main__":
    main()
