"""The tables and the figure of docs/proof.md, from ladders of networks; nothing is trained here.

    python experiments/promise_summary.py [--results experiments/results/promise.jsonl] [--draws 300]
                                          [--page docs/proof.md]

Many searches are drawn from each ladder of `promise.py`: see promise_rules.py, whose rules call what `compress` calls.
The results go to results/promise_rules.json. The page keeps its text: only what is between its markers is replaced.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cells import DATASETS
from figures import Axis, line, svg, text
from page import fill
from promise_ladder import Ladder
from promise_rules import BOUND, CERTIFIED, OLD, RULES, SETTINGS, UNLABELLED, Result, Setting, judge
from sections import bold, percent, points, table

from basisprune.budget.certify import certifiable, images_needed
from basisprune.files import write_text

ROOT = Path(__file__).parent.parent
LABELS_RESULT = ROOT / "benchmarks" / "results" / "labels.json"
LEVEL = ROOT / "benchmarks" / "results" / "level.json"
BROKEN, BROKEN_AT_MOST, COST, LABELS = 0.05, 0.08, 1.3, 0.1
COLOURS = {OLD: "#7b8794", BOUND: "#f59e0b", CERTIFIED: "#ef4444", UNLABELLED: "#2563eb"}


def named(setting: Setting | None) -> str:
    """A setting in words.

    >>> named(Setting(4000, 0.01))
    '1.0 points, 4,000 images'
    """
    return "all" if setting is None else f"{points(setting.max_drop)} points, {setting.images:,} images"


def rule_table(results: Sequence[Result]) -> str:
    """Every rule in every setting: how often it delivers, breaks the budget, and what it costs."""
    rows = [
        [
            named(result.setting),
            bold(result.rule, result.rule == CERTIFIED),
            percent(result.delivered),
            "" if result.broken is None else percent(result.broken.share),
            "" if result.broken is None else " to ".join(percent(end) for end in result.broken.interval),
            "" if result.cost is None else f"{result.cost:.2f}",
            f"{result.labels[0]:,.0f} ({result.labels[1]:,.0f})" if result.labels[0] else "",
        ]
        for result in results
    ]
    header = ("Budget", "Rule", "Delivers", "Breaks the budget", "Interval", "Parameters", "Labels to confirm (90%)")
    return table(header, rows)


def bar_table(results: Sequence[Result]) -> str:
    """The bars, and whether they hold."""
    (kept,) = (each for each in results if each.setting is None and each.rule == CERTIFIED)
    (cheap,) = (each for each in results if each.setting is None and each.rule == UNLABELLED)
    bars = []
    for found in (kept, cheap):
        if found.broken is None or found.cost is None:
            return "Nothing was certified."
        bars += [
            (f"{found.rule}: networks that break the budget", percent(found.broken.share), BROKEN, found.broken.share),
            ("upper end of the interval", percent(found.broken.interval[1]), BROKEN_AT_MOST, found.broken.interval[1]),
            ("parameters relative to the old rule", f"{found.cost:.2f}", COST, found.cost),
        ]
    share = cheap.labels[0] / kept.labels[0]
    size = cheap.size or math.inf
    bars.append(("parameters relative to those certified with all labels, median", f"{size:.2f}", 1.0, size))
    bars.append(("labels relative to labelling everything, median", percent(share), LABELS, share))
    rows = [
        [what, shown, f"{bar:g}" if bar >= 1 else percent(bar), "holds" if value <= bar else "**does not hold**"]
        for what, shown, bar, value in bars
    ]
    return table(("What", "Measured", "At most", "Verdict"), rows)


def image_table() -> str:
    """What so many confirming images certify, and how many a loss needs."""
    rows = [[f"{images:,}", f"{points(certifiable(images))} points"] for images in (200, 400, 800, 1600, 3200, 6400)]
    needs = [f"{points(drop)} points needs about {images_needed(drop):,}" for drop in (0.005, 0.01, 0.02, 0.03)]
    said = f"To pass in four of five cases, a budget of {', '.join(needs)} images."
    return f"{table(('Confirmation images', 'Certified: a loss of at most'), rows)}\n\n{said}"


def level_table(path: Path) -> str:
    """How often each test passes a network exactly at the limit, from benchmarks/level.py."""
    record = json.loads(path.read_text())
    found: dict[str, dict[str, str]] = {}
    for cell, value in record["results"].items():
        case, metric = cell.rsplit(", ", 1)
        found.setdefault(case, {})[metric] = percent(value["passed"])
    metrics = list(next(iter(found.values())))
    worst = max(value["passed"] + 2 * value["error"] for value in record["results"].values())
    counts = sorted({value.get("draws", record["config"]["draws"]) for value in record["results"].values()})
    pairs = " or ".join(f"{count:,}" for count in counts)
    said = f"Each is the share of {pairs} pairs of networks; with two standard errors, at most"
    header = ("Confirmation set", *metrics)
    rows = [[case.replace(" %", "%"), *(row.get(metric, "") for metric in metrics)] for case, row in found.items()]
    return f"{table(header, rows)}\n\n{said} {percent(worst)}."


def label_table(path: Path) -> str:
    """How many labels each test takes and how often it passes, from benchmarks/labels.py."""
    record = json.loads(path.read_text())
    rows = []
    for cell, tests in record["results"].items():
        case, loss = cell.rsplit(", ", 1)
        shown = [f"{each['labels']:.0f} ({percent(each['passed'])})" for each in tests.values()]
        rows.append([case.replace("1 points", "1 point"), loss, *shown])
    pairs = f"{record['config']['draws']:,} pairs"
    said = f"Median number of labels until the test is decided, and the share of {pairs} that passes."
    return f"{table(('Images, budget', 'True loss', *record['results'][cell]), rows)}\n\n{said}"


def ladder_table(ladders: Sequence[Ladder]) -> str:
    """The ladders: their number, and the average accuracy and size of their networks."""
    rows = []
    for dataset, name in DATASETS.items():
        mine = [ladder for ladder in ladders if ladder.dataset == dataset]
        if not mine:
            continue
        shortest = min(len(ladder.rungs) for ladder in mine)
        losses = [
            sum(float(ladder.hits[0].mean() - ladder.hits[rung].mean()) for ladder in mine) / len(mine)
            for rung in range(1, shortest)
        ]
        sizes = [sum(ladder.rungs[rung].parameters for ladder in mine) / len(mine) for rung in range(1, shortest)]
        unpruned = sum(float(ladder.hits[0].mean()) for ladder in mine) / len(mine)
        differing = sum(float((ladder.hits[0] ^ ladder.hits[1:]).mean()) for ladder in mine) / len(mine)
        shown = ", ".join(f"{size / 1e6:.2f}M: {points(loss)}" for size, loss in zip(sizes, losses, strict=True))
        rows.append([name, str(len(mine)), percent(unpruned), percent(differing), shown])
    header = ("Dataset", "Seeds", "Unpruned", "Differing answers", "Parameters: points lost, on average")
    return table(header, rows)


def settings_table(ladders: Sequence[Ladder], draws: int) -> str:
    """What all ladders have in common."""
    config, hours = ladders[0].config, sum(ladder.seconds for ladder in ladders) / 3600
    values = {
        "network, side of the images": f"EfficientNet-Lite0 with ImageNet weights, {config['side']} pixels",
        "images for training, and held out": f"{config['images']:,}, {config['pool']:,}",
        "epochs of the unpruned network, and after each pruning": f"{config['epochs']}, {config['tune_epochs']}",
        "searches drawn, for each ladder and budget": f"{draws}",
        "ladders, hours": f"{len(ladders)}, {hours:.1f}",
        "machine": ladders[0].device,
        "versions": ", ".join(f"{name} {value}" for name, value in ladders[0].versions.items()),
    }
    return table(("what", "value"), [[name, value] for name, value in values.items()])


def figure(results: Sequence[Result]) -> str:
    """Two panels, a row for each setting: how often the budget is broken, and the parameters it costs."""
    settings = [*SETTINGS, None]
    highest = max((each.broken.interval[1] for each in results if each.broken), default=0.1)
    rates, costs = Axis(0, max(0.1, highest), 190, 480), Axis(0.9, 1.6, 550, 840)
    bottom = 60 + 54 * len(settings)
    marks = [text(190, 18, "budget broken, share of runs"), text(550, 18, "parameters, times those of the old rule")]
    marks += [line(rates(BROKEN), 30, rates(BROKEN), bottom, 0.9), line(costs(COST), 30, costs(COST), bottom, 0.9)]
    for tick in (0, 0.05, 0.1, 0.2, 0.3, 0.4):
        if tick <= rates.high:
            marks.append(text(rates(tick), bottom + 16, percent(tick), "middle", ' class="small"'))
    marks += [text(costs(t), bottom + 16, f"{t:g}", "middle", ' class="small"') for t in (1, 1.1, 1.2, 1.3, 1.4, 1.5)]
    for row, setting in enumerate(settings):
        marks.append(text(180, 66 + 54 * row, named(setting), "end"))
        for place, rule in enumerate(RULES):
            (result,) = (each for each in results if (each.rule, each.setting) == (rule, setting))
            marks += _marks(result, rates, costs, 48 + 54 * row + 14 * place)
    for place, rule in enumerate(RULES):
        marks.append(f'<circle cx="{194 + 120 * place}" cy="{bottom + 34}" r="4" fill="{COLOURS[rule]}"/>')
        marks.append(text(204 + 120 * place, bottom + 38, rule))
    return svg(880, bottom + 48, marks)


def _marks(result: Result, rates: Axis, costs: Axis, y: float) -> list[str]:
    if result.broken is None or result.cost is None:
        return []
    colour, (low, high) = COLOURS[result.rule], result.broken.interval
    bar = f'<line x1="{rates(low):g}" y1="{y:g}" x2="{rates(high):g}" y2="{y:g}" stroke="{colour}" stroke-width="2"/>'
    dots = [(rates(result.broken.share), y), (costs(result.cost), y)]
    return [bar, *(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}"/>' for x, y in dots)]


def write_page(results: Path, page: Path, draws: int) -> None:
    """Draws the searches, writes their results, and fills the page's blocks."""
    ladders = Ladder.read(results)
    if not ladders:
        raise SystemExit(f"{results}: no ladders; make them with experiments/promise.py")
    judged = judge(ladders, draws)
    seeds = Counter(ladder.dataset for ladder in ladders)
    record = {"draws": draws, "ladders": dict(seeds), "results": [asdict(result) for result in judged]}
    write_text(results.with_name(f"{results.stem}_rules.json"), json.dumps(record, indent=1) + "\n")
    write_text(page.parent / "promise" / "rules.svg", figure(judged))
    blocks = {
        "settings": settings_table(ladders, draws),
        "bars": bar_table(judged),
        "figure": "![how often each rule breaks the budget, and what it costs](promise/rules.svg)",
        "rules": rule_table(judged),
        "ladders": ladder_table(ladders),
        "labels": label_table(LABELS_RESULT),
        "level": level_table(LEVEL),
        "units": level_table(LEVEL.with_stem("level_units")),
        "tasks": level_table(LEVEL.with_stem("level_tasks")),
    }
    write_text(page, fill(page.read_text(), blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results" / "promise.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "proof.md")
    parser.add_argument("--draws", type=int, default=300)
    options = parser.parse_args()
    write_page(options.results, options.page, options.draws)
    explained = ROOT / "docs" / "promise.md"
    write_text(explained, fill(explained.read_text(), {"images": image_table()}))


if __name__ == "__main__":
    main()
