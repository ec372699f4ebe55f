"""The demo's training on one thread, and on all with threads that spin or sleep while they wait.

    python benchmarks/threads.py [--rounds 3]

Trains the demo's network on 192 digits in a process of its own, alone and beside a busy program, in turns; medians go
to results/threads.json. `basisprune demo` uses one thread (OMP_NUM_THREADS=1), unless you say otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from common import write_result

CODE = """
import time
from dataclasses import replace
from basisprune import fit
from basisprune.data import take
from basisprune.demo import demo_data, demo_model, demo_recipe
model, images = demo_model(), take(demo_data().train, range(192))
config = replace(demo_recipe().train, epochs=1)
fit(model, take(images, range(32)), None, config, progress=False)  # the first batch is slow
start = time.perf_counter()
fit(model, images, None, config, progress=False)
print(time.perf_counter() - start)
"""
WAYS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "spinning": {"OMP_WAIT_POLICY": "ACTIVE"},
    "sleeping": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def seconds(way: str) -> float:
    others = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment = others | WAYS[way]
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for beside in ("alone", "beside a busy program"):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if beside != "alone" else None
            try:
                for way in WAYS:
                    found.setdefault(f"{way}, {beside}", []).append(seconds(way))
            finally:
                if busy is not None:
                    busy.kill()
                    busy.wait()
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    write_result("threads", {"rounds": options.rounds, "images": 192}, medians)
    print(medians)


if __name__ == "__main__":
    main()
