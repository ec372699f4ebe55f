"""Generates docs/measured.md, and the numbers in the README, docs/deploy.md and docs/guarantees.md, from JSON results.

    python benchmarks/tables.py [--demo runs/demo]

Measures nothing. With --demo, the output of `basisprune demo` in that folder is first copied to results/demo.json, and
a screenshot of its report to docs/report.png.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from common import RESULTS, load, table, write_result
from speed_tables import frontier_picture, frontier_rows, kernel_rows
from training_tables import averages_section, best_section, search_section

from basisprune.report.figures import PALETTE
from basisprune.report.html import comparison
from basisprune.results import RunSummary

ROOT = Path(__file__).parent.parent
FAULTS = {
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "ctrl-c": "Ctrl-C, and again at each operation that follows",
    "full": "the disk is full from then on",
    "read-only": "the disk is read-only from then on",
    "denied": "permission is denied once",
    "short": "no file can grow beyond 600 bytes from then on",
    "flip": "a bit is flipped in a file that is read",
}


def recipe_section() -> str:
    rows = [
        (cell, f"{r['logistic regression']:.3f}", f"{r['decomposed and trained']:.3f}", str(r["epochs"]))
        for cell, r in load("recipe")["results"].items()
    ]
    header = ("network, data", "logistic regression", "norms, scales and classifier trained", "epochs")
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
    return table(("network, data", "ratio", "by max", "by mean", "by median", "none"), rows)


def allocation_section() -> str:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for result in load("allocation")["results"].values():
        accuracy, place = result["accuracy"], f"{result['network']}, {result['dataset']}"
        row = found.setdefault((place, f"{result['left']:.0%}"), {"unpruned": f"{result['accuracy before']:.3f}"})
        row[result["way"]] = "not possible" if accuracy is None else f"{accuracy:.3f}"
    ways = list(next(iter(found.values())))
    titles = [way.replace(" %", "%") for way in ways]
    rows = [(*place, *(row.get(way, "") for way in ways)) for place, row in found.items()]
    note = (
        "Accuracy on 2,000 test images right after pruning and refit, at 32x32, in the loss basis. `quick` takes "
        "scores as they are, leaves at least 5% of the vectors in each layer, and removes blocks of eight; each other "
        "column changes one of these. All networks in a row have equally many parameters "
        "(`benchmarks/allocation.py`)."
    )
    return f"{table(('network, data', 'parameters left', *titles), rows)}\n\n{note}"


def scores_section() -> str:
    ways = ((128, "none"), (128, "mean"), (128, "refit"), (8, "none"), (8, "mean"), (8, "refit"))
    rows = []
    for cell, results in load("scores")["results"].items():
        found = {(r.get("batch"), r.get("compensate"), r["ratio"]): r["accuracy"] for r in results}
        rows.append((cell, "0", *[f"{found.pop((None, None, 0.0)):.3f}"] * len(ways)))
        ratios = sorted({ratio for *_, ratio in found})
        rows += [(cell, str(ratio), *(f"{found[(*way, ratio)]:.3f}" for way in ways)) for ratio in ratios]
    return table(("network, data", "ratio", *(f"batches of {size}, {how}" for size, how in ways)), rows)


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
    speed = f"{step['speed']:.2f} ({min(step['speeds']):.2f} to {max(step['speeds']):.2f} in individual processes)"
    rows = [
        ("training step, ResNet-50: speed of the decomposed network relative to the plain one", speed),
        ("the same with frozen scales, which need no gradient", f"{step['frozen']:.2f}"),
        ("the same, predicted from multiply-adds alone", f"{step['macs']:.2f}"),
        ("peak memory of a step, decomposed relative to plain", f"{step['memory']:.2f}"),
        ("time of `decompose` relative to a bare LAPACK SVD", f"{step['decompose']:.2f}"),
    ]
    for name, result in prune.items():
        rows.append(
            (f"time to prune 30% of the filters of {name}, relative to torch-pruning", f"{result['pruning']:.2f}")
        )
        rows.append((f"time of the HRank scores of {name}, relative to a forward pass", f"{result['hrank']:.2f}"))
    return table(("what", "ratio"), rows)


def coverage_section() -> str:
    records = [json.loads(line) for line in (RESULTS / "coverage.jsonl").read_text().splitlines()]
    good = [record for record in records if record["ok"]]
    half = [record for record in good if 2 * record["prunable"] >= record["filters"]]
    seconds = sorted(record["seconds_trace"] for record in good)
    rows = [
        ("networks", str(len(records))),
        ("pruned, then run forward and backward", str(len(good))),
        ("with at least half of all filters prunable", str(len(half))),
        ("median seconds to trace", f"{seconds[len(seconds) // 2]:.2f}"),
    ]
    failed = ", ".join(record["name"] for record in records if not record["ok"]) or "none"
    return table(("what", "number"), rows) + f"\n\nFailed: {failed}."


def latency_section() -> str:
    results = dict(sorted(load("latency")["results"].items(), key=lambda cell: cell[0].rpartition(" ")[2]))
    names = [name for name in next(iter(results.values())) if name not in ("original", "dense")]
    rows = []
    for cell, found in results.items():
        shares = (f"{found[name]['speedup']:.2f} of {found[name]['macs']:.2f}" for name in names)
        rows.append((cell, *shares))
    count = sum(row["bar"] > 0 for found in results.values() for row in found.values())
    missed = [
        f"{cell}, {name} ({row['speedup']:.2f}, required: {row['bar']:.2f})"
        for cell, found in results.items()
        for name, row in found.items()
        if not row["reached"]
    ]
    said = f"{len(missed)} of {count} targets missed{': ' if missed else ''}{'; '.join(missed)}."
    note = "Each cell is the speed-up over the dense network, and the one that multiply-adds alone predict. "
    return table(("network, runtime", *names), rows) + f"\n\n{note}{said}"


def frontier_section() -> str:
    if not (RESULTS / "frontier.json").exists():
        return "Not measured yet: `python benchmarks/frontier.py --assets DIR --scratch DIR` does that."
    results = load("frontier")["results"]
    header = ("model", "network", "accuracy", "parameters removed", "milliseconds", "speed-up", "gain of latency")
    (ROOT / "docs" / "frontier.svg").write_text(frontier_picture(results))
    note = (
        "One image in ONNX Runtime, right after pruning. `taylor` plans by Taylor scores. `shares`, the default of "
        "`compress`, removes the same share of filters and basis vectors. `params` and `latency` plan all ranks and "
        "widths together, by parameters or time. The gain is the speed-up of `latency` relative to the row, at the "
        "same accuracy; networks that only guess have none."
    )
    bar = load("frontier")["config"]["bar"]
    gains = {
        f"{name} {network}": round(row["gain"], 2)
        for name, rows in results.items()
        for network, row in rows.items()
        if row.get("gain") is not None
    }
    short = [f"{name} ({gain:.2f})" for name, gain in gains.items() if gain < bar]
    missed = [name for name in short if " taylor " in name]
    others = [name for name in short if " taylor " not in name]
    note += f" Relative to `taylor`, it should be at least {bar}; missed by: {', '.join(missed) or 'none'}."
    note += f" Relative to the others it has no target, and is below {bar} for: {', '.join(others) or 'none'}."
    figure = "![accuracy against milliseconds](frontier.svg)"
    return f"{figure}\n\n{table(header, frontier_rows(results))}\n\n{note}"


def basis_images_section() -> str:
    results = load("basis_images")["results"]
    rows = [(count, *(f"{value:.1f}" for value in found.values())) for count, found in results.items()]
    note = (
        "The importance of the less important half of a layer's vectors on other training images, relative to their "
        "importance on the images of the basis; the median over the layers of each third of the network."
    )
    return f"{table(('images', 'first', 'middle', 'last'), rows)}\n\n{note}"


def kernels_section() -> str:
    header = ("model", "network", "milliseconds", "explained", "the kinds of nodes that take most (how many)")
    note = (
        "`explained` is the time that the network would take if its multiply-adds, with channels padded to full "
        "blocks, were as fast as those of the unpruned network on average."
    )
    return f"{table(header, kernel_rows(load('kernels')['results']))}\n\n{note}"


def demo_section() -> str:
    found = load("demo")["results"]
    before, after = found["before"], found["after"]
    shown = {"parameters": "{:,}", "macs": "{:,}", "bytes": "{:,} bytes"}
    titles = {"macs": "multiply-adds", "bytes": "file"}
    rows = [("accuracy on 500 test images", f"{before['accuracy']:.1%}", f"{after['accuracy']:.1%}", "")]
    pairs = [(name, *pair, "{:.1f} ms") for name, *pair in found["latency"]]
    pairs += [(titles.get(key, key), before[key], after[key], form) for key, form in shown.items()]
    for title, old, new, form in pairs:
        rows.append((title, form.format(old), form.format(new), f"{new / old - 1:+.0%}"))
    verdict = found["verdict"].replace(" %", "%")
    return table(("", "before", "after", "change"), rows) + f"\n\n{verdict}"


def demo_runs_section() -> str:
    """What the demo came to in other runs."""
    before = load("demo")["results"]["before"]["parameters"]
    rows = [
        (name, f"{found['parameters']:,}", f"{found['parameters'] / before - 1:+.0%}", found["certificate"]["status"])
        for name, found in load("demo_runs")["results"].items()
    ]
    return table(("run", "parameters", "change", "a loss of at most 1 point"), rows)


def picture(width: int, height: int, title: str, marks: Sequence[str]) -> str:
    """An SVG in the colours of the report, light and dark."""
    light, dark = ({name: pair[side] for name, pair in PALETTE.items()} for side in (0, 1))
    rules = (
        "text{{font:13px Inter,system-ui,sans-serif;fill:{muted}}}.b{{font-weight:600;fill:{accent}}}"
        ".a{{fill:{accent}}}.f{{fill:{faint}}}.i{{fill:{ink}}}line{{stroke:{line}}}.d{{stroke:{accent};stroke-width:1.5;"
        "stroke-dasharray:2 3}}.x{{stroke:{faint};stroke-width:1.8}}"
    )
    style = f"<style>{rules.format(**light)}@media(prefers-color-scheme:dark){{{rules.format(**dark)}}}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    return "\n".join([f"{head}{style}", *marks, "</svg>\n"])


def before_after_picture() -> str:
    """Bars of the demo's network before and after."""
    found = load("demo")["results"]
    before, after = found["before"], found["after"]
    bars = [
        (title, before[name], after[name], f"{before[name] / 1e6:.2f}{unit}", f"{after[name] / 1e6:.2f}{unit}")
        for name, title, unit in (
            ("parameters", "parameters", "M"),
            ("macs", "multiply-adds", "M"),
            ("bytes", "file", " MB"),
        )
    ]
    _, old, new = found["latency"][0]
    bars.append(("time per image", old, new, f"{old:.2f} ms", f"{new:.2f} ms"))
    left, most, top, row = 150, 400, 44, 46
    marks = [f'<text x="{left}" y="24" class="b">accuracy {before["accuracy"]:.1%} → {after["accuracy"]:.1%}</text>']
    for number, (name, old, new, was, now) in enumerate(bars):
        y, short = top + row * number, most * new / old
        marks += [
            f'<text x="{left - 12}" y="{y + 22}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{most}" height="16" rx="3" class="f"/>',
            f'<text x="{left + most + 8}" y="{y + 13}">{was}</text>',
            f'<rect x="{left}" y="{y + 18}" width="{short:.1f}" height="16" rx="3" class="a"/>',
            f'<text x="{left + short + 8:.1f}" y="{y + 31}" class="b">{now} ({new / old - 1:+.0%})</text>',
        ]
    return picture(660, top + row * len(bars), "The network of the demo before and after", marks)


def demo_picture() -> str:
    """Accuracy against parameters of every candidate of the search, on an axis of logarithms, with the budget."""
    rows = load("demo")["results"]["candidates"]
    width, height, left, top = 660, 320, 78, 24
    across, down, right = width - left - 24, height - top - 56, 24
    smallest, largest = (end(row["parameters"] for row in rows) for end in (min, max))
    low, high = math.log10(0.8 * smallest), math.log10(1.25 * largest)
    accuracies, budget = [row["accuracy"] for row in rows], rows[0]["accuracy"] - 0.01
    highest = max(*accuracies, budget)
    lowest = max(min(*accuracies, budget), budget - 2 * max(highest - budget, 0.01))  # hopeless ones squeeze the others
    below = sum(each < lowest for each in accuracies)
    room = 0.08 * (highest - lowest)

    def x(parameters: float) -> float:
        return left + across * (math.log10(parameters) - low) / (high - low)

    def y(accuracy: float) -> float:
        return top + down * float((highest + room - accuracy) / (highest - lowest + 2 * room))

    marks = []
    for tick in (part * 10**decade for decade in range(3, 9) for part in (1, 2, 5)):
        if low <= math.log10(tick) <= high:
            said = f"{tick / 1e6:g}M" if tick >= 1e6 else f"{tick / 1e3:g}k"
            marks.append(f'<line x1="{x(tick):.1f}" y1="{top}" x2="{x(tick):.1f}" y2="{top + down}"/>')
            marks.append(f'<text x="{x(tick):.1f}" y="{top + down + 18}" text-anchor="middle">{said}</text>')
    step = next(each for each in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if (highest - lowest) / each <= 6)
    for count in range(math.ceil((lowest - room) / step), math.floor((highest + room) / step) + 1):
        level = y(count * step)
        marks.append(f'<line x1="{left}" y1="{level:.1f}" x2="{width - right}" y2="{level:.1f}"/>')
        marks.append(f'<text x="{left - 8}" y="{level + 4:.1f}" text-anchor="end">{count * step:.1%}</text>')
    level = y(budget)
    marks += [
        f'<text x="{left + across / 2}" y="{height - 8}" text-anchor="middle">parameters</text>',
        f'<text transform="translate(16 {top + down / 2}) rotate(-90)" text-anchor="middle">validation accuracy</text>',
        f'<line x1="{left}" y1="{level:.1f}" x2="{width - right}" y2="{level:.1f}" class="d"/>',
        f'<text x="{left + 4}" y="{level - 5:.1f}" class="b">budget</text>',
        f'<text x="{left + 4}" y="{top + down - 6}">{f"{below} below {lowest:.0%} not shown" if below else ""}</text>',
    ]
    for number, row in enumerate(row for row in rows if row["accuracy"] >= lowest):
        at, of = x(row["parameters"]), y(row["accuracy"])
        name = "unpruned" if number == 0 else "chosen" if row["chosen"] else ""
        if number == 0:
            marks.append(f'<path d="M{at:.1f} {of - 7:.1f}l7 7l-7 7l-7-7z" class="i"/>')
        elif not row["passed"]:
            marks.append(f'<path d="M{at - 4:.1f} {of - 4:.1f}l8 8m0-8l-8 8" class="x"/>')
        else:
            marks.append(f'<circle cx="{at:.1f}" cy="{of:.1f}" r="{8 if name else 5}" class="a"/>')
        if name:
            anchor, side = ("end", -12) if at > width / 2 else ("start", 12)
            said = f"{name}, {row['parameters'] / 1e6:.2f}M"
            under = of - 12 if of > top + 30 else of + 20
            marks.append(f'<text x="{at + side:.1f}" y="{under:.1f}" text-anchor="{anchor}">{said}</text>')
    return picture(width, height, "Accuracy and parameters of all candidates of the demo", marks)


def faults_section() -> str:
    found, config = load("faults")["results"], load("faults")["config"]
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in FAULTS}
    for name, outcome in found.items():
        counts[name.partition(",")[0]][outcome if outcome in ("same", "refused") else "wrong"] += 1
    operations, writing = (sum(scene[kind] for scene in config["operations"].values()) for kind in ("all", "writing"))
    places = {operations: "each operation", writing: "each operation that writes"}
    rows = []
    for kind, count in counts.items():
        struck = places.get(count.total(), f"{count.total()} of {operations} operations")
        place = f"{config['flips']} bits of each file" if kind == "flip" else struck
        rows.append((FAULTS[kind], place, *map(str, (count.total(), count["same"], count["refused"], count["wrong"]))))
    new, again = (config["operations"][scene]["all"] for scene in ("new", "again"))
    wrong = sum(count["wrong"] for count in counts.values())
    said = (
        f"The run has {new} file operations in a new folder and {again} in one with a finished result. "
        f"In {wrong} of {len(found):,} faults, a result was lost or different, or there was a traceback or a hang:"
    )
    header = ("fault", "placed at", "number", "same answer", "refused by name", "wrong")
    return f"{said}\n\n{table(header, rows)}"


def fuzz_section() -> str:
    found, config = load("fuzz")["results"], load("fuzz")["config"]
    rows = [
        (name, str(counts.get("read", 0)), str(counts.get("refused", 0)), str(counts.get("wrong", 0)))
        for name, counts in found["by target"].items()
    ]
    said = f"The fuzzer read {found['files']:,} corrupted files in {config['seconds'] / 60:.0f} minutes:"
    return f"{said}\n\n{table(('file', 'read', 'refused', 'wrong'), rows)}"


def runtimes_section() -> str:
    record = load("runtimes")
    found, packages = record["results"], record["config"]["packages"]
    rows = [
        (
            row["title"],
            f"{row['bytes']:,}",
            f"{row['difference']:.1e}" if row["file"] else "",
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%}",
            f"{row['latency_ms']:.2f} ms",
            f"{row['spread_ms']:.2f} ms",
        )
        for row in found["rows"]
    ]
    header = (
        "runtime",
        "bytes",
        "largest difference from PyTorch",
        "accuracy on the test images",
        "one image",
        "spread",
    )
    versions = ", ".join(f"{name} {number}" for name, number in packages.items())
    missing = f" Not installed: {', '.join(found['missing'])}." if found["missing"] else ""
    faster = [
        f"{name}: {each['onnx ms']:.2f} ms and {each['openvino ms']:.2f} ms, {each['speedup']:.2f} times as fast "
        f"({each['low']:.2f} to {each['high']:.2f} in the middle half of the rounds)"
        for name, each in found.get("OpenVINO against ONNX Runtime", {}).items()
    ]
    said = f"ONNX Runtime and OpenVINO on the same graphs, alternating: {'; '.join(faster)}." if faster else ""
    return f"{table(header, rows)}\n\nWith {versions}.{missing} {said}".rstrip()


def large_data_section() -> str:
    record = load("large_data") if (RESULTS / "large_data.json").exists() else {"results": {}, "config": {}}
    found, config = record["results"], record["config"]
    if "speed" not in found:
        return "Not measured yet: `python benchmarks/large_data.py` does that."
    few, many = config["images"], config["images"] * config["times"]
    rows = [
        (
            name,
            f"{each['once']['peak']:.0f} MB",
            f"{each['many']['peak']:.0f} MB",
            f"{each['ratio']:.2f}",
            *(f"{found['speed'][f'{name}, {workers} workers']:.0f}" for workers in (0, 1, 2)),
        )
        for name, each in found.items()
        if name != "speed"
    ]
    header: tuple[str, ...] = ("source", f"peak, {few:,} images", f"peak, {many:,} images", "ratio")
    header = (*header, *(f"images a second, {workers} workers" for workers in ("no", "1", "2")))
    decoded = 3 * config["size"] ** 2 * many / 2**20
    said = (
        f"JPEG files of {config['side']} x {config['side']} pixels and {config['bytes per image'] / 1024:.0f} KB, read "
        f"at {config['size']} x {config['size']} ({record['device']}). The memory is that of a process, all packages "
        "included, that opens all images and goes through the training images once, in random order, with one worker; "
        f"decoded, the {many:,} images would take {decoded:,.0f} MB. In the same run, training {config['model']} took "
        f"{found['speed']['training']:.0f} images a second."
    )
    return f"{table(header, rows)}\n\n{said} Generated from `benchmarks/large_data.py`."


def measured_page() -> str:
    """Every benchmark: what it asks, its table, and a summary before all of them."""
    parts = ["# Measurements", "", summary_section(), ""]
    for title, (about, section) in SECTIONS.items():
        parts += [f"## {title}", "", about, "", section(), ""]
    return "\n".join(parts)


def summary_section() -> str:
    """The findings of the page in a few lines, each with a link."""
    ratios = load("step")["results"], load("prune")["results"]
    latency = [row for found in load("latency")["results"].values() for row in found.values() if row["bar"] > 0]
    gains = [
        row["gain"]
        for networks in load("frontier")["results"].values()
        for name, row in networks.items()
        if name.startswith("taylor") and row.get("gain") is not None
    ]
    names = {"resnet50": "ResNet-50", "densenet121": "DenseNet-121"}
    pruning = " and ".join(f"{found['pruning']:.2f} ({names.get(name, name)})" for name, found in ratios[1].items())
    records = [json.loads(line) for line in (RESULTS / "coverage.jsonl").read_text().splitlines()]
    found = load("best")["results"]
    quick, best = (found[f"efficientnet_lite0, cifar10, {recipe}, seed 0"]["pruned"] for recipe in ("quick", "best"))
    return "\n".join(
        [
            "Numbers behind the defaults: what each choice gains, how fast networks become, and what did not help.",
            "",
            f"- **Speed-up.** {sum(row['reached'] for row in latency)} of {len(latency)} combinations of network, "
            "runtime and ratio reach the speed-up that we require, given their multiply-adds "
            "([latency](#latency-at-128x128-on-one-thread)).",
            f"- **Planning by latency** is {min(gains):.1f} to {max(gains):.1f} times as fast as planning by Taylor "
            "scores, at the same accuracy ([accuracy against time](#accuracy-against-time)).",
            f"- **Longer training.** On CIFAR-10, the recipe `best` reaches {best:.1%} where `quick` reaches "
            f"{quick:.1%} ([quick and best](#ten-times-the-training-the-recipes-quick-and-best)).",
            f"- **Cost of the method.** A training step of decomposed ResNet-50 runs at {ratios[0]['speed']:.2f} of "
            f"the plain network's speed, with {ratios[0]['memory']:.2f} times its memory. Pruning filters "
            f"takes {pruning} of torch-pruning's time ([speed and memory](#speed-and-memory)).",
            f"- **Coverage.** The filters of {sum(record['ok'] for record in records)} of {len(records)} networks of "
            "timm and torchvision can be pruned ([coverage](#coverage-of-filter-pruning)).",
            "",
            "`python benchmarks/tables.py` makes this page from `benchmarks/results/`; "
            "`benchmarks/README.md` says how to repeat each measurement.",
        ]
    )


SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "Training norms, scales and classifier": (
        "How far does the paper's training get, against a logistic regression on the frozen features? 2,000 training "
        "images at 64x64, accuracy on 1,000 test images.",
        recipe_section,
    ),
    "Normalising scores": (
        "Should scores be normalised within each layer? Accuracy right after pruning, with parameters; each layer "
        "keeps at least 5% of its vectors.",
        plan_section,
    ),
    "A minimum share in each layer": (
        "Should each layer keep a minimum share of its vectors? Accuracy right after pruning.",
        shares_section,
    ),
    "Distributing basis vectors among layers": (
        "Which plan is best when scores are in units of the loss?",
        allocation_section,
    ),
    "Scores and compensation": (
        "What do smaller batches for the scores gain, and compensation? Accuracy right after pruning.",
        scores_section,
    ),
    "Images for the loss basis": ("How many images does the basis need?", basis_images_section),
    "Searches: steps by the expected loss against halving": (
        "How should a search choose its next candidate?",
        search_section,
    ),
    "Ten times the training: the recipes quick and best": ("What does longer training gain?", best_section),
    "Averages of the weights": ("Does a moving average of the weights help? Not clearly.", averages_section),
    "L1 norms of decomposed layers": (
        "Of which weights should the L1 score be? Accuracy right after pruning.",
        l1_section,
    ),
    "Speed and memory": ("What does the method itself cost?", ratios_section),
    "Latency at 128x128 on one thread": ("How much faster are pruned networks?", latency_section),
    "Accuracy against time": ("Which way of planning gives the fastest network for an accuracy?", frontier_section),
    "Where the time goes": ("Why is the speed-up smaller than the multiply-adds suggest?", kernels_section),
    "Coverage of filter pruning": ("Which networks can be pruned?", coverage_section),
}


def fill(path: Path, name: str, text: str) -> None:
    """Replaces what is between the marks of that name in the file."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def take_demo(folder: Path) -> None:
    """Copies the demo's numbers, and takes a screenshot of its report if Chromium is installed."""
    summary = RunSummary.read(folder / "summary.json")
    if summary.test is None:
        raise SystemExit(f"{folder}: this run had no test images")
    kept = ("basis_ratio", "filter_ratio", "accuracy", "parameters", "macs", "passed", "chosen")
    candidates = [{key: getattr(candidate, key) for key in kept} for candidate in summary.candidates]
    times = [(row.label, row.before, row.after) for row in comparison(summary) if row.key == "latency_ms"]
    results = asdict(summary.test) | {"verdict": summary.verdict, "latency": times, "candidates": candidates}
    write_result("demo", {"command": "basisprune demo"}, results)
    shutil.copyfile(folder / "summary.json", RESULTS / "demo_summary.json")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is not None:
        with tempfile.TemporaryDirectory() as profile:
            flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}"]
            flags += ["--window-size=1100,1500", "--virtual-time-budget=10000"]
            picture, page = ROOT / "docs" / "report.png", (folder / "report.html").resolve().as_uri()
            subprocess.run([browser, *flags, f"--screenshot={picture}", page], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="a folder that `basisprune demo` wrote")
    options = parser.parse_args()
    if options.demo is not None:
        take_demo(options.demo)
    (ROOT / "docs" / "measured.md").write_text(measured_page())
    (ROOT / "docs" / "demo.svg").write_text(demo_picture())
    (ROOT / "docs" / "before-after.svg").write_text(before_after_picture())
    fill(ROOT / "docs" / "guarantees.md", "numbers", f"{faults_section()}\n\n{fuzz_section()}")
    block = f"{demo_section()}\n\n![accuracy and parameters of all candidates](docs/demo.svg)"
    fill(ROOT / "README.md", "demo", block)
    fill(ROOT / "README.md", "runs", demo_runs_section())
    fill(ROOT / "docs" / "deploy.md", "runtimes", runtimes_section())
    fill(ROOT / "docs" / "scaling.md", "large-data", large_data_section())


if __name__ == "__main__":
    main()
