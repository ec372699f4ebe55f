"""All measured numbers as docs/measured.md, and the demo's table and picture in the README, from the JSON results.

    python benchmarks/tables.py [--demo runs/demo]

Nothing is measured here. With --demo, the summaries of `basisprune demo` in that folder are taken over into
results/demo.json first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, write_result

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def load(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def recipe_section() -> str:
    rows = [
        (cell, f"{r['logistic regression']:.3f}", f"{r['decomposed and trained']:.3f}", str(r["epochs"]))
        for cell, r in load("recipe")["results"].items()
    ]
    header = ("network, data", "logistic regression", "decomposed, recipe `quick`", "passes")
    return table(header, rows)


def plan_section() -> str:
    rows = []
    for cell, results in load("plan")["results"].items():
        for ratio in sorted({r["ratio"] for r in results}):
            chosen = {
                r.get("normalise"): r for r in results if r["ratio"] == ratio and r.get("min_share", 0.05) == 0.05
            }
            if None in chosen:
                rows.append((cell, "0", f"{chosen[None]['accuracy']:.3f}", "", "", ""))
                continue
            accuracies = [
                f"{r['accuracy']:.3f} ({r['parameters'] / 1e6:.2f}M)" if r["accuracy"] is not None else "not possible"
                for r in (chosen[key] for key in ("max", "mean", "median", "none"))
            ]
            rows.append((cell, str(ratio), *accuracies))
    return table(("network, data", "ratio", "by max", "by mean", "by median", "as they are"), rows)


def shares_section() -> str:
    rows = []
    for cell, results in load("plan")["results"].items():
        for normalise in ("max", "none"):
            for ratio in sorted({r["ratio"] for r in results} - {0.0}):
                found = {
                    r["min_share"]: r["accuracy"]
                    for r in results
                    if r["ratio"] == ratio and r.get("normalise") == normalise
                }
                shares = [f"{found[key]:.3f}" if found[key] is not None else "not possible" for key in sorted(found)]
                rows.append((cell, normalise, str(ratio), *shares))
    return table(("network, data", "normalisation", "ratio", "floor 0", "floor 0.05", "floor 0.1"), rows)


def l1_section() -> str:
    rows = [
        (name, str(r["ratio"]), f"{r['dense filter']:.3f}", f"{r['second factor']:.3f}")
        for name, results in load("l1")["results"].items()
        for r in results
    ]
    return table(("network", "filters removed", "dense filter", "second factor"), rows)


def ratios_section() -> str:
    step, prune = load("step")["results"], load("prune")["results"]
    rows = [
        ("training step, ResNet-50: speed of the decomposed network over the plain one", f"{step['speed']:.2f}"),
        ("the same with frozen scales, whose gradient costs nothing", f"{step['limit']:.2f}"),
        ("the same, if multiply-adds were all", f"{step['macs']:.2f}"),
        ("peak memory of a step, decomposed over plain", f"{step['memory']:.2f}"),
        ("`decompose` over a bare LAPACK SVD, time", f"{step['decompose']:.2f}"),
    ]
    for name, result in prune.items():
        rows.append((f"pruning 30 % of the filters of {name} over torch-pruning, time", f"{result['pruning']:.2f}"))
        rows.append((f"HRank scores of {name} over a forward pass, time", f"{result['hrank']:.2f}"))
    return table(("what", "ratio"), rows)


def coverage_section() -> str:
    records = [json.loads(line) for line in (RESULTS / "coverage.jsonl").read_text().splitlines()]
    good = [record for record in records if record["ok"]]
    half = [record for record in good if 2 * record["prunable"] >= record["filters"]]
    seconds = sorted(record["seconds_trace"] for record in good)
    rows = [
        ("networks", str(len(records))),
        ("pruned, run forward and backward", str(len(good))),
        ("with at least half of all filters prunable", str(len(half))),
        ("median seconds to trace", f"{seconds[len(seconds) // 2]:.2f}"),
    ]
    failed = ", ".join(record["name"] for record in records if not record["ok"]) or "none"
    return table(("what", "number"), rows) + f"\n\nFailed: {failed}."


def latency_section() -> str:
    results = load("latency")["results"]
    names = [name for name in next(iter(results.values())) if name not in ("original", "dense")]
    rows = []
    for cell, found in results.items():
        shares = (f"{found[name]['speedup']:.2f} of {found[name]['macs']:.2f}" for name in names)
        rows.append((cell, *shares))
    count = sum(row["bar"] > 0 for found in results.values() for row in found.values())
    missed = [
        f"{cell}, {name} ({row['speedup']:.2f}, {row['bar']:.2f} was to be reached)"
        for cell, found in results.items()
        for name, row in found.items()
        if not row["reached"]
    ]
    said = f"Of {count} bars {len(missed)} missed{': ' if missed else ''}{'; '.join(missed)}."
    note = "Each cell is the speed-up over the dense network, of the one that multiply-adds alone would give. "
    return table(("network, runtime", *names), rows) + f"\n\n{note}{said}"


def demo_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = load("demo")["results"]
    return rows


def demo_section() -> str:
    rows = demo_rows()
    first = rows[0]
    return table(
        ("framework", "accuracy", "parameters", "removed", "multiply-adds", "removed"),
        [
            (
                row["framework"],
                f"{row['accuracy']:.1%}",
                f"{row['parameters'] / 1e6:.2f}M",
                f"{1 - row['parameters'] / first['parameters']:.0%}",
                f"{row['macs'] / 1e6:.1f}M",
                f"{1 - row['macs'] / first['macs']:.0%}",
            )
            for row in rows
        ],
    )


def demo_picture() -> str:
    """The parameters of each network as bars, with its accuracy, as an SVG."""
    rows, step, left, longest = demo_rows(), 44, 120, 340
    most = max(row["parameters"] for row in rows)
    marks = []
    for number, row in enumerate(rows):
        y, length = 20 + step * number, longest * row["parameters"] / most
        label = f"{row['parameters'] / 1e6:.2f}M parameters, {row['accuracy']:.1%}"
        colour = "#94a3b8" if number == 0 else "#2563eb"
        marks.append(f'<text x="{left - 10}" y="{y + 18}" text-anchor="end">{row["framework"]}</text>')
        marks.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="26" rx="4" fill="{colour}"/>')
        marks.append(f'<text x="{left + length + 10:.1f}" y="{y + 18}">{label}</text>')
    height = 20 + step * len(rows)
    style = "<style>text{font:13px sans-serif;fill:#64748b}</style>"
    body = "".join(marks)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {height}">{style}{body}</svg>\n'


def take_demo(folder: Path) -> None:
    summaries = [json.loads(path.read_text()) for path in folder.glob("*.json") if "plan" not in path.name]
    rows = [
        {
            "framework": summary["framework"],
            "accuracy": summary["test_accuracy"],
            "parameters": summary["stages"][-1]["parameters"],
            "macs": summary["stages"][-1]["macs"],
        }
        for summary in summaries
        if "framework" in summary
    ]
    write_result("demo", {"command": "basisprune demo"}, sorted(rows, key=lambda row: -row["parameters"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="a folder that `basisprune demo` wrote")
    options = parser.parse_args()
    if options.demo is not None:
        take_demo(options.demo)
    sections = {
        "Training: the recipe `quick` on 2,000 images at 64x64, accuracy on 1,000 test images": recipe_section,
        "Plans: accuracy right after pruning, and parameters, by normalisation (floor 0.05)": plan_section,
        "Plans: accuracy right after pruning, by the floor that each layer keeps": shares_section,
        "L1 norms of decomposed layers: accuracy right after pruning": l1_section,
        "Speed and memory": ratios_section,
        "Latency at 128x128 on one thread": latency_section,
        "Reach of filter pruning": coverage_section,
    }
    parts = ["# Measured", "", "Made by `python benchmarks/tables.py` from `benchmarks/results/`.", ""]
    for title, section in sections.items():
        parts += [f"## {title}", "", section(), ""]
    (ROOT / "docs" / "measured.md").write_text("\n".join(parts))
    (ROOT / "docs" / "demo.svg").write_text(demo_picture())
    readme = (ROOT / "README.md").read_text()
    before, rest = readme.split(BEGIN)
    block = f"{demo_section()}\n\n![parameters and accuracy](docs/demo.svg)"
    (ROOT / "README.md").write_text(f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
