"""Files that are wrong in every way: whatever is read from disk gives the right value or an error of ours.

    python benchmarks/fuzz.py [--seconds 600] [--targets npz,images,...] [--seed 0]

Sound files of every kind are changed at random, in their bytes or in what they say (with checksums made right again,
as one would who means harm), and read. Only a BasisPruneError may come out, within a few seconds and a few gigabytes.
Counts go to results/fuzz.json; it ends with exit code 1 if anything else came out, and says by which seed.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from fuzz_targets import Target, all_targets

from basisprune.errors import BasisPruneError

SLOWEST, LONGEST = 20, 300  # seconds for one file: of work, and of waiting
_TIMERS = (signal.SIGPROF, signal.SIGALRM)
MEMORY = 6 << 30  # bytes beyond what the program has when it starts


class TooSlowError(Exception):
    """Reading took too long."""


def tried(target: Target, folder: Path, seed: int) -> str:
    """What became of one spoilt file: "read", "refused", or what else came out."""
    for left in folder.iterdir():
        left.unlink()
    target.spoil(folder, random.Random(f"{target.name} {seed}"))

    def stop(*_: object) -> None:
        raise TooSlowError

    before = [signal.signal(number, stop) for number in _TIMERS]
    signal.setitimer(signal.ITIMER_PROF, SLOWEST)
    signal.alarm(LONGEST)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about odd images
            target.read(folder)
        return "read"
    except BasisPruneError as error:
        return "refused" if len(str(error)) < 20_000 else "a message of more than 20,000 characters"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in zip(_TIMERS, before, strict=True):
            signal.signal(number, handler)


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
        targets = all_targets(source)
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
