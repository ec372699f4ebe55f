"""What the demo found in several runs: with other threads or processors, sums round differently and it ends elsewhere.

    python benchmarks/demo_runs.py "one thread=FOLDER" ["two threads=FOLDER" ...]

Runs nothing: each FOLDER is one that `basisprune demo --output FOLDER` wrote. Writes results/demo_runs.json.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from common import write_result

from basisprune.results import RunSummary


def found(folder: Path) -> dict[str, object]:
    """The parameters and the certificate of a run."""
    summary = RunSummary.read(folder / "summary.json")
    if summary.test is None:
        raise SystemExit(f"{folder}: this run had no test images")
    certificate = None if summary.certificate is None else asdict(summary.certificate)
    return {"parameters": summary.test.after.parameters, "verdict": summary.verdict, "certificate": certificate}


if __name__ == "__main__":
    if not sys.argv[1:] or not all("=" in given for given in sys.argv[1:]):
        raise SystemExit(__doc__)
    runs = dict(given.rsplit("=", 1) for given in sys.argv[1:])
    write_result("demo_runs", {"command": "basisprune demo"}, {name: found(Path(at)) for name, at in runs.items()})
