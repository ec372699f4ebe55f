"""The tables, verdicts and figures of docs/field.md and of the README, from the results; nothing is run here.

    python experiments/field_summary.py [--results experiments/results/field.jsonl]
                                        [--parts experiments/results/parts.jsonl] [--page docs/field.md]
                                        [--readme README.md]

The pages keep their text: only what is between their markers is replaced. Figures go into a folder beside the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import studies
from cells import DATASETS
from field_figures import MODEL_NAMES, field_figure
from field_points import Cost, Mean, Record, cost_at, frontier, mean_points, read_records, swept_rates
from page import fill
from parts_table import parts_tables
from sections import bold, percent, table

from basisprune.files import write_text

ROOT = Path(__file__).parent.parent
BARS: dict[Cost, float] = {"parameters": 0.6, "ms": 0.7}
QUICK_BAR = 0.7
MINUS = "\u2212"
SMALL = "efficientnet_lite0"
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
    """The bars on a dataset: against the frontier of all rivals, against `quick`, against smaller images."""
    ours = [point for point in points if point.kind == "ours"]
    rivals = [point for point in points if point.kind in RIVALS]
    found = [
        Verdict(BEST, rival, axis, cost_at(ours, rival.accuracy, axis), bar)
        for axis, bar in BARS.items()
        for rival in frontier(rivals, axis)
    ]
    for model in MODEL_NAMES:
        mine = [point for point in ours if point.model == model]
        found += [
            Verdict("old `quick`", old, "parameters", cost_at(mine, old.accuracy, "parameters"), QUICK_BAR)
            for old in frontier((p for p in points if p.kind == "quick" and p.model == model), "parameters")
        ]
    found += [
        Verdict("smaller network", small, axis, cost_at(ours, small.accuracy, axis), 1.0)
        for small in points
        if small.kind == "small"
        for axis in UNITS
    ]
    return found


def same_seeds(records: Sequence[Record], dataset: str) -> list[Verdict]:
    """The bars on a dataset, of each other network against ours averaged over the seeds that it was run with.

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


def verdict_table(records: Sequence[Record]) -> str:
    """All bars on all datasets, and how many hold."""
    rows, held, count = [], 0, 0
    for dataset, name in DATASETS.items():
        for verdict in same_seeds(records, dataset):
            theirs, ratio = verdict.theirs, verdict.ratio
            held, count = held + verdict.holds, count + 1
            rows.append(
                [
                    name,
                    verdict.bar_of,
                    named(theirs),
                    str(len(theirs.seeds)),
                    percent(theirs.accuracy),
                    UNITS[verdict.axis],
                    shown(verdict.axis, theirs.cost(verdict.axis)),
                    "not as good" if verdict.ours is None else shown(verdict.axis, verdict.ours),
                    "" if ratio is None else f"{ratio:.2f}",
                    f"{verdict.bar:g}",
                    "holds" if verdict.holds else "**does not hold**",
                ]
            )
    header = (
        "Dataset",
        "Against",
        "Method",
        "Seeds",
        "Accuracy",
        "Cost",
        "Theirs",
        "Ours",
        "Ratio",
        "Required",
        "Verdict",
    )
    return f"{table(header, rows)}\n\n{held} of {count} comparisons hold."


def named(point: Mean) -> str:
    """Name the method with its size, in the words of the page.

    >>> named(Mean(SMALL, "mnist", "l1", "rival", (0.3,), (0,), 0, (0, 0), 0, 0, 0, 0, None))
    'L1, −30%'
    >>> named(Mean("resnet50", "mnist", "ours, by time", "ours", (0.7,), (0,), 0, (0, 0), 0, 0, 0, 0, None))
    'ours at 70% lower latency, from ResNet-50'
    """
    origin = "" if point.model == SMALL else f", from {MODEL_NAMES.get(point.model, point.model)}"
    return f"{_sized(titled(point.method), point.size)}{origin}"


def _sized(method: str, size: tuple[float, ...]) -> str:
    if method.startswith("ours, by time"):
        return f"ours at {size[0]:.0%} lower latency{method.removeprefix('ours, by time')}"
    if len(size) == 2:
        return f"{method}, {MINUS}{size[0]:.0%} filters, {MINUS}{size[1]:.0%} ranks"
    return f"{method}, {size[0]:g} pixels" if size[0] > 1 else f"{method}, {MINUS}{size[0]:.0%}"


def titled(method: str) -> str:
    """Spell a method as its authors do.

    >>> titled("torch-pruning taylor, by layer")
    'torch-pruning Taylor, by layer'
    """
    names = {"hrank": "HRank", "l1": "L1", "truncated svd": "truncated SVD", "quick": "old `quick`"}
    first, *rest = method.replace(" taylor", " Taylor").split(", ")
    return ", ".join([names.get(first, first), *rest])


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
    kinds = ("unpruned", "small", "rival", "quick", "ours")
    rows = [
        [
            MODEL_NAMES.get(point.model, point.model),
            _sized(titled(point.method), point.size),
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

    Only what has all seeds on all datasets; sizes and times are means over the datasets. A rival is there once, at its
    most accurate size.
    """
    most = max(len(point.seeds) for point in points)
    of_method: dict[tuple[str, tuple[float, ...]], dict[str, Mean]] = {}
    for point in points:
        if point.model == SMALL and len(point.seeds) == most:
            of_method.setdefault((point.method, point.size), {})[point.dataset] = point
    by_kind: dict[str, list[dict[str, Mean]]] = {"unpruned": [], "small": [], "rival": [], "quick": [], "ours": []}
    for found in sorted(of_method.values(), key=lambda found: -mean(point.accuracy for point in found.values())):
        if len(found) == len(DATASETS):
            by_kind[next(iter(found.values())).kind].append(found)
    rivals: dict[str, dict[str, Mean]] = {}
    for found in by_kind["rival"]:
        rivals.setdefault(next(iter(found.values())).method, found)
    rows = []
    for found in (*by_kind["unpruned"], *by_kind["small"], *list(rivals.values())[:2], *by_kind["ours"]):
        accuracies = (percent(found[dataset].accuracy) for dataset in DATASETS)
        costs = (shown(axis, mean(point.cost(axis) for point in found.values())) for axis in UNITS)
        rows.append([named(next(iter(found.values()))), *accuracies, *costs])
    return table(("EfficientNet-Lite0", *DATASETS.values(), *UNITS.values()), rows)


def rate_table(records: Sequence[Record]) -> str:
    """The accuracy on validation images at each rate of the sweep."""
    rows = []
    for (model, method), rates in sorted(swept_rates(records).items()):
        if len(rates) > 1:
            best = max(rates, key=rates.__getitem__)
            texts = [
                bold(f"{rate:g}: {percent(rates[rate])}", rate == best)
                for rate in sorted(rates, key=lambda rate: rate or 0.0)
            ]
            rows.append([MODEL_NAMES.get(model, model), titled(method), ", ".join(texts)])
    return table(("Network", "Method", "Learning rate of the weights: accuracy"), rows)


def settings_table(records: Sequence[Record]) -> str:
    """The settings that all runs share."""
    first = records[0]
    config, tuning = first["config"], first["config"]["tuning"]
    hours = sum(record["processor_seconds"] for record in records) / 3600
    values = {
        "images for training, validation, test": [f"{config[f'{part}images']:,}" for part in ("", "val_", "test_")],
        "side of the enlarged images": [f"{config['side']} pixels"],
        "passes of the start, and of each tuning, by the clock": [
            f"{config[f'{part}_passes']:g}" for part in ("start", "tune")
        ],
        "batch size, optimiser": [str(tuning["batch_size"]), tuning["optimizer"]],
        "learning rate of norms, scales and classifier": [f"{tuning['lr']:g}"],
        "runs, hours of one core": [str(len(records)), f"{hours:.1f}"],
        "machine": [first["device"]],
        "versions": [f"{name} {value}" for name, value in first["versions"].items()],
    }
    rows = [[name, ", ".join(texts)] for name, texts in values.items()]
    return table(("what", "value"), rows)


def write_pages(results: Path, parts: Path, page: Path, readme: Path) -> None:
    """Fills the blocks of the page and of the README, and writes the page's figures."""
    records = read_records(results)
    points = mean_points(records)
    here = [dataset for dataset in DATASETS if any(point.dataset == dataset for point in points)]
    folder = page.with_suffix("")
    for dataset in here:
        write_text(folder / f"{dataset}.svg", field_figure(points, dataset))
    tables = [f"### {DATASETS[d]}\n\n{point_table(p for p in points if p.dataset == d)}" for d in here]
    blocks = {
        "overview": overview(points),
        "settings": settings_table(records),
        "verdicts": verdict_table(records),
        "figures": "\n\n".join(f"![{DATASETS[dataset]}]({folder.name}/{dataset}.svg)" for dataset in here),
        "tables": "\n\n".join(tables),
        "rates": rate_table(records),
        "parts": parts_tables(list(studies.read(parts).values())),
    }
    write_text(page, fill(page.read_text(), blocks))
    write_text(readme, fill(readme.read_text(), {"field": overview(points)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results" / "field.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "field.md")
    parser.add_argument("--parts", type=Path, default=ROOT / "experiments" / "results" / "parts.jsonl")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    write_pages(options.results, options.parts, options.page, options.readme)


if __name__ == "__main__":
    main()
