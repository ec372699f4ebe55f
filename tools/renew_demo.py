"""Renew everything that the demo shows: its numbers, pictures, the screenshot and the sample report.

    python tools/renew_demo.py [FOLDER]

Runs `basisprune demo` in FOLDER (runs/demo), or reuses its result if it is finished, and then the scripts that write
the README, the pictures in docs/ and the record of the run. The report's screenshot needs Chromium.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def steps(folder: Path) -> list[list[str]]:
    """The commands, in order.

    >>> [" ".join(Path(word).name for word in step[1:4]) for step in steps(Path("runs/demo"))]
    ['-m basisprune demo', 'demo_runs.py demo', 'tables.py --demo demo']
    """
    tools = ROOT / "benchmarks"
    return [
        [sys.executable, "-m", "basisprune", "demo", "--output", str(folder)],
        [sys.executable, str(tools / "demo_runs.py"), f"one thread={folder}"],
        [sys.executable, str(tools / "tables.py"), "--demo", str(folder)],
    ]


if __name__ == "__main__":
    for step in steps(Path(sys.argv[1] if sys.argv[1:] else "runs/demo")):
        subprocess.run(step, cwd=ROOT, check=True)
