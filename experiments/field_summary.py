"""The tables, verdicts and figures of docs/field.md and of the README, from the JSON results; nothing is run here.

    python experiments/field_summary.py [--results experiments/results/field.jsonl] [--parts experiments/results/parts]
                                        [--page docs/field.md] [--readme README.md]

The pages keep their text: only what is between their markers is replaced. Figures go into a folder beside the first.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

from cells import DATASETS
from field_figures import MODEL_NAMES, field_figure
from field_methods import METHODS
from field_points import Cost, Mean, cost_at, frontier, mean_points
from field_results import Record, read_results
from page import fill
from parts_table import parts_tables
from sections import percent, table

from basisprune.files import write_text

ROOT = Path(__file__).parent.parent
BARS: dict[Cost, float] = {"parameters": 0.6, "ms": 0.7}
SMALL = "efficientnet_lite0"
NOTHING = "Not run yet."
BEST, RIVALS = "best rival", ("rival", "small", "unpruned")
UNITS: dict[Cost, str] = {"parameters": "parameters", "macs": "multiply-adds", "ms": "milliseconds"}


@dataclass(frozen=True)
class Verdict:
    """What ours needs at the accuracy of another point, in relation to that; None where ours is never as good."""

    bar_of: str
    theirs: Mean
    axis: Cost
    ours: float | None
    bar: float

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return None if self.ours is None else self.ours / self.theirs.cost(self.axis)

    @property
    def holds(self) -> bool:
        """Whether ours keeps to the bar."""
        return self.ratio is not None and self.ratio <= self.bar


def verdicts(points: Sequence[Mean]) -> list[Verdict]:
    """The bars on a dataset: against the frontier of all rivals, and against smaller images."""
    ours = [point for point in points if point.kind == "ours"]
    rivals = [point for point in points if point.kind in RIVALS]
    found = [
        Verdict(BEST, rival, axis, cost_at(ours, rival.accuracy, axis), bar)
        for axis, bar in BARS.items()
        for rival in frontier(rivals, axis)
    ]
    found += [
        Verdict("smaller network", small, axis, cost_at(ours, small.accuracy, axis), 1.0)
        for small in points
        if small.kind == "small"
        for axis in UNITS
    ]
    return found


def same_seeds(records: Sequence[Record], dataset: str) -> list[Verdict]:
    """The bars on a dataset, of each other network against ours in the mean over the seeds that it was run with.

    A rival that another one beats on the seeds that both have is left out, however many seeds they have.
    """

    @cache
    def points(seeds: tuple[int, ...] | None) -> list[Mean]:
        return [point for point in mean_points(records, seeds) if point.dataset == dataset]

    others = {_name(point): point.seeds for point in points(None) if point.kind != "ours"}

    def beaten(theirs: Mean, axis: Cost) -> bool:
        common = {tuple(sorted({*theirs.seeds} & {*seeds})) for seeds in others.values()} - {()}
        return any(
            _name(theirs) not in map(_name, frontier((p for p in points(seeds) if p.kind in RIVALS), axis))
            for seeds in common
        )

    found = []
    for seeds in sorted(set(others.values()), key=len, reverse=True):
        mine = (verdict for verdict in verdicts(points(seeds)) if others[_name(verdict.theirs)] == seeds)
        found += [v for v in mine if v.bar_of != BEST or not beaten(v.theirs, v.axis)]
    return found


def _name(point: Mean) -> tuple[str, str, tuple[float, ...]]:
    return point.model, point.method, point.size


def all_verdicts(records: Sequence[Record]) -> list[tuple[str, Verdict]]:
    """All bars, with the name of the dataset."""
    return [(name, verdict) for dataset, name in DATASETS.items() for verdict in same_seeds(records, dataset)]


def verdict_table(found: Sequence[tuple[str, Verdict]]) -> str:
    """A row for each bar."""
    rows = [
        [
            name,
            verdict.bar_of,
            named(verdict.theirs),
            str(len(verdict.theirs.seeds)),
            percent(verdict.theirs.accuracy),
            UNITS[verdict.axis],
            shown(verdict.axis, verdict.theirs.cost(verdict.axis)),
            "not as good" if verdict.ours is None else shown(verdict.axis, verdict.ours),
            "" if verdict.ratio is None else f"{verdict.ratio:.2f}",
            f"{verdict.bar:g}",
            "holds" if verdict.holds else "**does not hold**",
        ]
        for name, verdict in found
    ]
    header = ("Dataset", "Against", "Method", "Seeds", "Accuracy", "Of", "Theirs", "Ours", "Ratio", "Bar", "Verdict")
    return table(header, rows)


def held(found: Sequence[tuple[str, Verdict]]) -> str:
    """How many bars hold, and which do not, in words."""
    broken = Counter(name for name, verdict in found if not verdict.holds)
    where = ", ".join(f"{count} on {name}" for name, count in broken.items())
    return f"{len(found) - broken.total()} of {len(found)} bars hold{'; those that do not: ' if where else ''}{where}."


def existing(records: Sequence[Record]) -> str:
    """Which cells were run, in words."""
    total = sum(len(method.sizes) for method in METHODS.values())
    ran: list[str] = []
    none: list[str] = []
    for (model, model_name), (dataset, name) in product(MODEL_NAMES.items(), DATASETS.items()):
        seeds = Counter(r["seed"] for r in records if (r["model"], r["dataset"]) == (model, dataset))
        counts = ", ".join(f"{count} with seed {seed}" for seed, count in sorted(seeds.items()))
        (ran if counts else none).append(f"{model_name} on {name}{': ' if counts else ''}{counts}")
    missing = f" None yet: {', '.join(none)}." if none else ""
    return f"These cells have been run, of {total} for each network, dataset and seed: {'; '.join(ran)}.{missing}"


def comparison(points: Sequence[Mean]) -> str:
    """A sentence for each dataset: ours without half of the time, the unpruned network and the most accurate rival."""
    lines = []
    for dataset, name in DATASETS.items():
        here = [point for point in points if point.dataset == dataset and point.model == SMALL]
        ours = [point for point in here if (point.method, point.size) == ("ours, by time", (0.5,))]
        unpruned = [point for point in here if point.kind == "unpruned"]
        rivals = sorted((p for p in here if p.kind == "rival"), key=lambda point: -point.accuracy)
        if not (ours and unpruned):
            continue
        others = [_against(ours[0], other) for other in (*unpruned, *rivals[:1])]
        seeds = "seed" if len(ours[0].seeds) == 1 else "seeds"
        lines.append(
            f"- {name}: ours by time 0.5 has {percent(ours[0].accuracy)} on the test images "
            f"({len(ours[0].seeds)} {seeds}); {'; '.join(others)}."
        )
    return "\n".join(lines) or "Ours by time 0.5 and the unpruned network have not both been run yet."


def _against(ours: Mean, other: Mean) -> str:
    best = ", the most accurate pruned rival," if other.kind == "rival" else ""
    sizes = " and ".join(f"{ours.cost(axis) / other.cost(axis):.2f} of its {UNITS[axis]}" for axis in BARS)
    return f"{named(other)}{best} has {percent(other.accuracy)}, and ours {sizes}"


def named(point: Mean) -> str:
    """The method with what it was given.

    >>> named(Mean(SMALL, "mnist", "l1", "rival", (0.3,), (0,), 0, (0, 0), 0, 0, 0, 0, None))
    'l1 0.3'
    """
    origin = "" if point.model == SMALL else f", from {MODEL_NAMES.get(point.model, point.model)}"
    return f"{point.method} {' + '.join(f'{part:g}' for part in point.size)}{origin}"


def shown(axis: Cost, cost: float) -> str:
    """A cost in its unit.

    >>> shown("parameters", 1.2e6), shown("ms", 0.5)
    ('1.20M', '0.50')
    """
    return f"{cost:.2f}" if axis == "ms" else f"{cost / 1e6:.2f}M" if axis == "parameters" else f"{cost / 1e6:.1f}M"


def point_table(points: Iterable[Mean]) -> str:
    """Every point, by network and method, from large to small."""
    header = (
        "Network",
        "Method",
        "Accuracy",
        "Interval",
        "Untuned",
        "Parameters",
        "Multiply-adds",
        "ms",
        "Passes",
        "Pruning, s",
        "Seeds",
    )
    kinds = ("unpruned", "small", "rival", "ours")
    rows = [
        [
            MODEL_NAMES.get(point.model, point.model),
            named(point).split(", from")[0],
            percent(point.accuracy),
            f"{percent(point.interval[0])} to {percent(point.interval[1])}",
            "" if point.untuned is None else percent(point.untuned),
            shown("parameters", point.parameters),
            shown("macs", point.macs),
            shown("ms", point.ms),
            f"{point.passes:.0f}",
            f"{point.pruning:.0f}" if point.pruning else "",
            str(len(point.seeds)),
        ]
        for point in sorted(points, key=lambda p: (p.model, kinds.index(p.kind), p.method, -p.parameters))
    ]
    return table(header, rows)


def overview(points: Sequence[Mean]) -> str:
    """For the README: the unpruned network, smaller ones, the two most accurate rivals and ours, all of one backbone.

    Only what was run wherever the unpruned network was, with as many seeds; sizes and times are means over the
    datasets. A rival is there once, at its most accurate size.
    """
    mine = [point for point in points if point.model == SMALL]
    seeds = {point.dataset: len(point.seeds) for point in mine if point.kind == "unpruned"}
    if not seeds:
        return NOTHING
    here = [dataset for dataset in DATASETS if dataset in seeds]
    of_method: dict[tuple[str, tuple[float, ...]], dict[str, Mean]] = {}
    for point in mine:
        if len(point.seeds) >= seeds.get(point.dataset, 10**9):
            of_method.setdefault((point.method, point.size), {})[point.dataset] = point
    by_kind: dict[str, list[dict[str, Mean]]] = {"unpruned": [], "small": [], "rival": [], "ours": []}
    for found in sorted(of_method.values(), key=lambda found: -mean(point.accuracy for point in found.values())):
        if len(found) == len(here):
            by_kind[next(iter(found.values())).kind].append(found)
    rivals: dict[str, dict[str, Mean]] = {}
    for found in by_kind["rival"]:
        rivals.setdefault(next(iter(found.values())).method, found)
    rows = []
    for found in (*by_kind["unpruned"], *by_kind["small"], *list(rivals.values())[:2], *by_kind["ours"]):
        accuracies = (percent(found[dataset].accuracy) for dataset in here)
        costs = (shown(axis, mean(point.cost(axis) for point in found.values())) for axis in UNITS)
        rows.append([named(next(iter(found.values()))), *accuracies, *costs])
    counted = ", ".join(f"{DATASETS[dataset]} {seeds[dataset]}" for dataset in here)
    header = ("EfficientNet-Lite0", *(DATASETS[dataset] for dataset in here), *UNITS.values())
    return f"{table(header, rows)}\n\nSeeds: {counted}."


def settings_table(records: Sequence[Record]) -> str:
    """What all cells have in common."""
    protocol = records[0]["settings"]["protocol"]
    machines = {record["settings"]["device"]: None for record in records}
    versions = {f"{name} {value}": None for record in records for name, value in record["settings"]["versions"].items()}
    hours = sum(record["processor_seconds"] for record in records) / 3600
    values = {
        "images for training, validation, test": [f"{protocol[f'{part}images']:,}" for part in ("", "val_", "test_")],
        "side of the enlarged images": [f"{protocol['side']} pixels"],
        "budget of the start, and of pruning and tuning, in passes": [
            f"{protocol[f'{part}_passes']:g}" for part in ("start", "tune")
        ],
        "CPU seconds of such a pass": [_range(records, "pass_seconds")],
        "cells, hours of one core": [str(len(records)), f"{hours:.1f}"],
        "machine": list(machines),
        "versions": list(versions),
    }
    return table(("what", "value"), [[name, ", ".join(texts)] for name, texts in values.items()])


def least_tuned(records: Sequence[Record]) -> str:
    """Which cells had no time left for more than one pass of tuning, in words."""
    names = {record["method"]: None for record in records if record["passes"] == 1}
    if not names:
        return "Every cell had time for more than one pass of tuning."
    return f"Cells of these methods had one pass of tuning, because their pruning took the rest: {', '.join(names)}."


def _range(records: Sequence[Record], name: str) -> str:
    by_model = {
        MODEL_NAMES[model]: [record[name] for record in records if record["model"] == model] for model in MODEL_NAMES
    }
    return "; ".join(f"{model} {min(found):.0f} to {max(found):.0f}" for model, found in by_model.items() if found)


def found_table(records: Sequence[Record]) -> str:
    """What the trainings found for themselves, by method."""
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record["found"])
    rows = []
    for method, found in sorted(by_method.items()):
        rates = [each["lr"] for each in found]
        shares = [
            sum(each[name] == value for each in found)
            for name, value in (("norm_statistics", "batch"), ("mixed_precision", "bf16"), ("flip", True))
        ]
        rows.append([method, f"{min(rates):.2g} to {max(rates):.2g}", *map(str, shares), str(len(found))])
    return table(("Method", "Learning rates", "Batch statistics", "bfloat16", "Mirrored", "Cells"), rows)


def write_pages(results: Path, parts: Path, page: Path, readme: Path) -> None:
    """Fill the blocks of the page and of the README, and write the page's figures."""
    records = read_results(results)
    folder = page.with_suffix("")
    for old in folder.glob("*.svg"):
        old.unlink()
    blocks = dict.fromkeys(("summary", "settings", "verdicts", "figures", "tables", "found"), NOTHING)
    field = NOTHING
    if records:
        points, bars = mean_points(records), all_verdicts(records)
        here = [dataset for dataset in DATASETS if any(point.dataset == dataset for point in points)]
        for dataset in here:
            write_text(folder / f"{dataset}.svg", field_figure(points, dataset))
        field = overview(points)
        tables = [f"### {DATASETS[d]}\n\n{point_table(p for p in points if p.dataset == d)}" for d in here]
        blocks = {
            "summary": f"{field}\n\n{comparison(points)}\n\n{held(bars)} {existing(records)}",
            "settings": f"{settings_table(records)}\n\n{least_tuned(records)}",
            "verdicts": f"{verdict_table(bars)}\n\n{held(bars)}",
            "figures": "\n\n".join(f"![{DATASETS[dataset]}]({folder.name}/{dataset}.svg)" for dataset in here),
            "tables": "\n\n".join(tables),
            "found": found_table(records),
        }
    of_parts = parts_tables([json.loads(path.read_text()) for path in sorted(parts.glob("*.json"))])
    write_text(page, fill(page.read_text(), {**blocks, "parts": of_parts}))
    write_text(readme, fill(readme.read_text(), {"field": field}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results" / "field.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "field.md")
    parser.add_argument("--parts", type=Path, default=ROOT / "experiments" / "results" / "parts")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    write_pages(options.results, options.parts, options.page, options.readme)


if __name__ == "__main__":
    main()
