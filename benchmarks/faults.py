"""What becomes of a run that is killed, or that the system fails, at any of its file operations.

    python benchmarks/faults.py [--kinds kill,full,...]

A small run of `basisprune compress` (the default framework, a search, a certificate, an ONNX file) is done once
undisturbed, while an audit hook counts its file operations in the folders of its output, its data and its temporary
files. Then it is done once more, and at each operation copies of the process are made (by forking), each for one
fault, which goes on from there in a copy of the folders:

kill, term       SIGKILL or SIGTERM right before the N-th operation
ctrl-c           SIGINT right before the N-th operation, and again before each one that follows
denied           the N-th operation is refused for want of permission
full, read-only  from the N-th operation on, all that would write is refused as by a full or a read-only disk
short            from the N-th operation on, no file can grow beyond 600 bytes, so that writing stops half-way
flip             one bit of one file that a resumed run, `predict` or `evaluate` reads is turned over

The first four strike at every operation. The next three make a difference only to operations that write, and strike
at each of those. A fault strikes a new folder ("new") or one with a finished result and a note of the user ("again"),
which must hold a whole result at every moment. Afterwards the same command runs undisturbed, and its answer (all
candidates, the chosen one, every weight and the ONNX file) is compared with that of the undisturbed run; a folder
whose every byte is as after an earlier fault has the answer that was found then. What was flipped may also be refused
by its name, as it must be where it cannot be made again: where that is the record of what was tested, the result is
called an estimate.

Each outcome goes to results/faults.json as it comes, and a benchmark that was stopped goes on. It ends with exit code
1 unless nothing was lost, different, silent or told by a traceback.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from common import Cells
from faults_stage import HUNG, Fault, Stage, predictions, warm_up, write_data, write_image

import basisprune
from basisprune.deploy.bundle import load_bundle
from basisprune.errors import BasisPruneError
from basisprune.results import RunSummary
from basisprune.runs.record import TESTS

EVERYWHERE = ("kill", "term", "ctrl-c", "denied")
WRITING = ("full", "read-only", "short")
KINDS = (*EVERYWHERE, *WRITING, "flip")
SCENES = ("new", "again")
FLIPS = 4  # in each file
GIVEN = frozenset({"recipe.yaml", "image.png", "notes.txt"})  # by the user, who may give anything else as well
GOOD = ("same", "refused")
Answer = dict[str, object]


class Evaluated:
    """A stage, the answer of an undisturbed run, and what is known of folders that faults have left."""

    def __init__(self, stage: Stage, expected: Answer) -> None:
        self.stage, self.expected = stage, expected
        self.recovered: dict[str, str] = {}  # state of a folder -> what was wrong with the run that went on from it

    def judged(self, fault: Fault, code: int, said: str) -> str:
        """What became of a run with this fault, which ended like this, and of the same command afterwards."""
        wrong = _wrong_at_once(self.stage, fault, code, said)
        if not wrong:
            state = f"{fault.scene} {self.stage.state()}"
            if state not in self.recovered:
                again = self.stage.start(self.stage.command)
                self.recovered[state] = self.wrong_afterwards(fault.scene == "again", again)
                said = self.stage.said
            wrong = self.recovered[state]
        return f"{wrong}\n{said[-1500:]}" if wrong else "same"

    def wrong_afterwards(self, has_note: bool, code: int) -> str:
        """What is wrong with the result of a run that ended with this code."""
        stage = self.stage
        if code != 0:
            return f"the next run ends with {code}"
        try:
            if stage.answer() != self.expected:
                return "another answer"
        except (BasisPruneError, OSError) as error:
            return f"no answer: {error}"
        if has_note and (stage.output / "model" / "notes.txt").read_text() != "mine":
            return "a file of the user is lost"
        return f"leftovers: {stage.leftovers()}" if stage.leftovers() else ""

    def flipped(self, fault: Fault, words: Sequence[str], usual: str) -> str:
        """What becomes of a bit that is turned over in a file, for a run that resumes or for what reads its result."""
        stage = self.stage
        finished(stage)
        write_data(stage.root / "data.npz")
        write_image(stage.root / "image.png")
        flip(stage.root / fault.what, random.Random(f"{fault.what} {fault.place}"))
        code = stage.start(words)
        said = stage.said
        if "Traceback" in said or code not in (0, 1):
            return f"{'hangs' if code == HUNG else 'a traceback'}\n{said[-1500:]}"
        if code == 1:
            return "refused" if Path(fault.what).name in said else f"refused without its name\n{said[-1500:]}"
        if fault.what.endswith(TESTS) and words[0] == "compress" and self.is_only_estimated(said):
            return "refused"
        wrong = self.wrong_afterwards(True, code) if words[0] == "compress" else "another answer" * (said != usual)
        return f"{wrong}\n{said[-1500:]}" if wrong else "same"

    def is_only_estimated(self, said: str) -> bool:
        """Whether a run named its damaged record of tests, tested nothing again, and says so in its result."""
        certificate = RunSummary.read(self.stage.output / "summary.json").certificate
        return TESTS in said and certificate is not None and not certificate.certified


def finished(stage: Stage) -> None:
    """The output folder holds a finished result and something of the user's."""
    stage.clear()
    shutil.copytree(stage.root.parent / "finished", stage.output)
    (stage.output / "model" / "notes.txt").write_text("mine")


def flip(path: Path, chance: random.Random) -> None:
    """Turns a bit of the file over."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _wrong_at_once(stage: Stage, fault: Fault, code: int, said: str) -> str:
    ended = {"kill": -signal.SIGKILL, "term": -signal.SIGTERM, "ctrl-c": 130}
    if code not in {ended.get(fault.kind, 1), 0}:
        return "hangs" if code == HUNG else f"exit code {code}"
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


# ------------------------------------------------------------------------------------------------- where to strike

Operation = tuple[str, str, bool]  # event, path, whether it writes


def operations(stage: Stage, words: Sequence[str]) -> list[Operation]:
    """The file operations of an undisturbed process."""
    log = stage.root.parent / "operations.jsonl"
    log.unlink(missing_ok=True)
    assert stage.start(words, log=log) == 0, stage.said
    return [(event, path, writes) for event, path, writes in map(json.loads, log.read_text().splitlines())]


def set_scene(stage: Stage, scene: str) -> None:
    """The folder that a run finds."""
    finished(stage) if scene == "again" else stage.clear()


def faults_at(done: Sequence[Operation], scene: str, kinds: Sequence[str]) -> list[Fault]:
    """All faults of these kinds at these operations."""
    return [
        Fault(kind, scene, place)
        for place, (_, _, writes) in enumerate(done, 1)
        for kind in kinds
        if kind in EVERYWHERE or (kind in WRITING and writes)
    ]


def flips_of(stage: Stage, words: Sequence[str]) -> Iterator[Fault]:
    """A fault for each of a few bits of every file that these words read."""
    finished(stage)
    done = operations(stage, words)
    read = dict.fromkeys(Path(path) for event, path, writes in done if event == "open" and not writes)
    finished(stage)
    by = f"{words[0]} by {Path(words[1]).name}" if words[0] == "predict" else words[0]
    for path in read:
        if path.is_file() and path.name not in GIVEN and "tmp" not in path.relative_to(stage.root).parts:
            for place in range(FLIPS):
                yield Fault("flip", by, place, str(path.relative_to(stage.root)))


def run_all(root: Path, kinds: Sequence[str]) -> dict[str, str]:
    """What became of every fault, by its name."""
    stage = Stage(root / "work")
    warm_up(stage)
    assert stage.start(stage.command) == 0, stage.said
    trial = Evaluated(stage, stage.answer())
    shutil.copytree(stage.output, root / "finished")
    found = {}
    for scene in SCENES:
        set_scene(stage, scene)
        found[scene] = operations(stage, stage.command)
    counts = {scene: {"all": len(done), "writing": sum(each[2] for each in done)} for scene, done in found.items()}
    cells = Cells("faults", {"operations": counts, "flips": FLIPS, "sources": sources()})
    print(counts, flush=True)
    for scene, done in found.items():
        strike(trial, scene, faults_at(done, scene, kinds), cells)
    if "flip" in kinds:
        for words in (stage.command, *predictions(stage)):
            turn_bits(trial, words, cells)
    return dict(cells.results)


def strike(trial: Evaluated, scene: str, faults: Sequence[Fault], cells: Cells) -> None:
    """Notes what becomes of the faults: of copies of one run, and where none can be made, of runs of their own."""

    def judge(fault: Fault, code: int, said: str) -> None:
        cells.run(fault.name, lambda: trial.judged(fault, code, said))

    stage = trial.stage
    set_scene(stage, scene)
    assert stage.branch(stage.command, [each for each in faults if each.name not in cells.results], judge) == 0
    for fault in faults:
        if fault.name not in cells.results:
            set_scene(stage, scene)
            judge(fault, stage.start(stage.command, fault), stage.said)


def turn_bits(trial: Evaluated, words: Sequence[str], cells: Cells) -> None:
    """Notes what becomes of bits that are turned over in the files that these words read."""
    chosen = list(flips_of(trial.stage, words))
    assert trial.stage.start(words) == 0, trial.stage.said
    usual = trial.stage.said
    for fault in chosen:
        cells.run(fault.name, lambda: trial.flipped(fault, words, usual))  # noqa: B023


def sources() -> str:
    """A checksum of the package, so that outcomes of other code are not taken for those of this."""
    folder = Path(basisprune.__file__).parent
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))))
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    kinds = parser.parse_args().kinds.split(",")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_all(Path(folder).resolve(), kinds)
    wrong = {name: said for name, said in outcomes.items() if said not in GOOD}
    print(json.dumps({"faults": len(outcomes), "wrong": len(wrong)}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
