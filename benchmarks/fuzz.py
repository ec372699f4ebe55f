"""Files that are wrong in every way: whatever is read from disk gives the right value or an error of ours.

    python benchmarks/fuzz.py [--seconds 600] [--targets npz,images,...] [--seed 0]

Sound files of every kind are changed at random, in their bytes or in what they say (with checksums made right again,
as one would who means harm), and read. Bundles are also forged: their graphs, structures and networks mix what is
allowed with what would do harm. Only a BasisPruneError may come out, within a few seconds and a few gigabytes, and an
audit hook sees to it that no bundle runs code, connects or writes. Configurations, sweeps and run folders name code and
hold bombs. Counts go to results/fuzz.json; it ends with exit code 1 if anything else came out, and says by which seed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import FrameType

import torch
from fuzz_settings import all_settings
from fuzz_targets import Target, all_targets

from basisprune.errors import BasisPruneError

SLOWEST, LONGEST = 20, 300  # seconds for one file: of work, and of waiting
_TIMERS = (signal.SIGPROF, signal.SIGALRM)
MEMORY = 6 << 30  # bytes beyond what the program has when it starts


_FORBIDDEN = (
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "pty.spawn", "ctypes.dlopen"),
    "pickle.find",
    *("socket.connect", "socket.getaddrinfo", "os.mkdir", "os.rename", "os.symlink", "os.link", "os.chmod", "shutil."),
)
_PYTHON = tuple({str(Path(place).resolve()) for place in (sys.prefix, sys.base_prefix, *sys.path) if place})


class Watch:
    """Notes what a program does besides computing, by Python's audit hook, while it is asked to."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if not self.is_on:
            return
        if event in ("compile", "exec"):
            code = args[0] if event == "exec" else args[1]
            file = str(getattr(code, "co_filename", code))
            if not file.startswith((*_PYTHON, "<frozen")) and not _is_of_python(sys._getframe(1)):
                self.seen.append(f"{event} {file}")
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            self.seen.append(f"{event} {args[0]}")
        elif event.startswith(_FORBIDDEN):
            self.seen.append(f"{event} {str(args)[:100]}")


def _is_of_python(frame: FrameType | None) -> bool:
    """Whether a library compiles source of its own: namedtuples, dataclasses and imports do."""
    if frame is None:
        return False
    return frame.f_code.co_filename.startswith(("<frozen", *_LIBRARIES))


_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (collections, dataclasses) if module.__file__)
WATCH = Watch()


class TooSlowError(Exception):
    """Reading took too long."""


def tried(target: Target, folder: Path, seed: int) -> str:
    """What became of one spoilt file: "read", "refused", or what else came out."""
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    WATCH.seen = []
    target.spoil(folder, random.Random(f"{target.name} {seed}"))

    def stop(*_: object) -> None:
        raise TooSlowError

    before = [signal.signal(number, stop) for number in _TIMERS]
    signal.setitimer(signal.ITIMER_PROF, SLOWEST)
    signal.alarm(LONGEST)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about odd images
            WATCH.is_on = target.is_watched
            target.read(folder)
        outcome = "read"
    except BasisPruneError as error:
        outcome = "refused" if len(str(error)) < 20_000 else "a message of more than 20,000 characters"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        WATCH.is_on = False
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in zip(_TIMERS, before, strict=True):
            signal.signal(number, handler)
    seen, WATCH.seen = WATCH.seen, []
    return f"did {seen[:5]}" if seen else outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--targets", default="", help="words in the names of those to try; default: all")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    from common import write_result

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        source, folder = Path(root) / "source", Path(root) / "spoilt"
        for place in (source, folder):
            place.mkdir()
        targets = [*all_targets(source), *all_settings(source / "settings")]
        targets = [each for each in targets if any(word in each.name for word in options.targets.split(","))]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, -1))
        counts: dict[str, collections.Counter[str]] = {each.name: collections.Counter() for each in targets}
        wrong, seed, end = [], options.seed, time.monotonic() + options.seconds
        while time.monotonic() < end:
            for target in targets:
                outcome = tried(target, folder, seed)
                if outcome not in ("read", "refused"):
                    wrong.append({"target": target.name, "seed": seed, "came out": outcome})
                    print(f"WRONG {wrong[-1]}", flush=True)
                    outcome = "wrong"
                counts[target.name][outcome] += 1
            seed += 1
    files = sum(sum(count.values()) for count in counts.values())
    results = {"files": files, "wrong": len(wrong), "by target": {k: dict(v) for k, v in counts.items()}}
    write_result("fuzz", {"seconds": options.seconds, "seed": options.seed}, results | {"first wrong": wrong[:20]})
    print(json.dumps(results, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
