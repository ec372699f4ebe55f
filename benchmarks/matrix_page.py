"""docs/coverage.md from the records of the matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Record = dict[str, Any]
_TITLES = {"exact": "exact", "basis": "basis 0.5", "double": "double 0.3", "onnx": "ONNX"}
_LIBRARIES = {"torchvision": "torchvision", "timm": "timm, one of each family"}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal, in what exporters say


def page(records: Sequence[Record], bars: Mapping[str, Mapping[str, float]], total: int, second: str = "") -> str:
    """The page: how many hold, what does not and why, every network, and the second table."""
    ordered = sorted(records, key=lambda record: (record["library"] == "timm", record.get("task", ""), record["name"]))
    parts = [_head(records), _progress(records, total), _summary(ordered, bars), _faults(ordered), _skipped(ordered)]
    for library in _LIBRARIES:
        rows = [record for record in ordered if record["library"] == library and "skipped" not in record]
        parts.append(f"## {_LIBRARIES[library]}\n\n{_table(rows)}")
    return "\n\n".join(part for part in [*parts, second] if part) + "\n"


_STACK_STEPS = {"exact": "exact", "filters": "filters 0.3", "fold": "fold", "bundle": "bundle"}


def stacks(records: Sequence[Record], total: int, bar: int) -> str:
    """The second table: networks of other libraries."""
    if not records:
        return ""
    counts = {step: sum(record.get(step) is True for record in records) for step in _STACK_STEPS}
    unfinished = f"**Not finished: {len(records)} of {total} networks have a record.** " if len(records) < total else ""
    lines = [
        "## Networks of other libraries",
        "",
        "Made by `python benchmarks/coverage.py --stacks` from `benchmarks/results/stacks.jsonl`: small configs, "
        "random weights. Each is split exactly, loses 30% of its filters, is folded, saved as a bundle with nothing "
        "said but the shape of an input, and loaded. A bundle that is a `graph` needs neither the class nor trust.",
        "",
        f"{unfinished}Of {len(records)}: "
        + ", ".join(f"{counts[step]} {title}" for step, title in _STACK_STEPS.items())
        + f" (bar for bundles: {bar} of {total}).",
        "",
        "| network | parameters | " + " | ".join(_STACK_STEPS.values()) + " |",
        "| --- | ---: |" + " ---: |" * len(_STACK_STEPS),
    ]
    for record in records:
        cells = [f"`{record['library']}/{record['name']}`", f"{record.get('parameters', 0) / 1e6:.2f}M"]
        for step in _STACK_STEPS:
            good = record.get(step) is True
            cells.append(record.get("bundle_form", "yes") if good and step == "bundle" else "yes" if good else "no")
        lines.append(f"| {' | '.join(cells)} |")
    for record in records:
        for step in ("build", *_STACK_STEPS):
            if (fault := record.get(step, True)) is not True:
                name = f"`{record['library']}/{record['name']}`, {_STACK_STEPS.get(step, step)}"
                lines.append(f"{'' if lines[-1].startswith('-') else chr(10)}- {name}: {_one_line(fault)}")
    return "\n".join(lines)


def _head(records: Sequence[Record]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in records[-1]["versions"].items()) if records else ""
    return (
        "# Supported networks\n\n"
        "Which networks can be compressed? We tried every classifier, segmentation network and detector of "
        "torchvision, and a small network of every family of timm, with random weights:\n\n"
        "- **exact**: decomposed in float64, the output is unchanged. The number is the largest difference, relative "
        "to the largest output; `share` is the share of the parameters in layers that were split.\n"
        "- **basis 0.5**: half of the basis vectors removed by Taylor scores, folded, compared, saved as a bundle, "
        "loaded and compared bit for bit.\n"
        "- **double 0.3**: then 30% of all filters removed, run in eval mode and forward and backward in training "
        "mode, folded, saved, loaded.\n"
        "- **ONNX**: the result in onnxruntime, equal for several batch sizes.\n\n"
        "Classifiers get a new head (`transfer_model`); other networks keep theirs. Of detectors, the output before "
        "the choice of boxes is compared. `left` is the share of the parameters after both prunings, folded. Made by "
        f"`python benchmarks/coverage.py --all` from `benchmarks/results/matrix.jsonl`, with {versions}; do not edit."
    )


def _progress(records: Sequence[Record], total: int) -> str:
    if len(records) >= total:
        return ""
    return f"**Not finished: {len(records)} of {total} networks have a record; the shares below are of those.**"


def _summary(records: Sequence[Record], bars: Mapping[str, Mapping[str, float]]) -> str:
    lines = ["| | networks | " + " | ".join(_TITLES.values()) + " |", "| --- |" + " ---: |" * (1 + len(_TITLES))]
    for library, title in _LIBRARIES.items():
        rows = [record for record in records if record["library"] == library and "skipped" not in record]
        cells = []
        for step in _TITLES:
            good = sum(record.get(step) is True for record in rows)
            bar = bars[library].get(step)
            share = f"{good} ({good / max(1, len(rows)):.1%})"
            cells.append(share if bar is None else f"{share}, bar {bar:.0%}")
        lines.append(f"| {title} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _faults(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        for step in ("build", *_TITLES):
            fault = record.get(step, True)
            if fault is not True and fault != "an earlier step failed":
                lines.append(f"- {record['library']} `{record['name']}`, {_TITLES.get(step, step)}: {_one_line(fault)}")
    return "## What does not hold, and why\n\n" + "\n".join(lines) if lines else ""


def _skipped(records: Sequence[Record]) -> str:
    lines = [f"- {r['library']} `{r['name']}`: {r['skipped']}" for r in records if "skipped" in r]
    return "## Left out\n\n" + "\n".join(lines) if lines else ""


def _table(records: Sequence[Record]) -> str:
    titles = ["network", "family or task", "size", "parameters", "share", "exact", *list(_TITLES.values())[1:], "left"]
    lines = [f"| {' | '.join(titles)} |", "| --- | --- |" + " ---: |" * (len(titles) - 2)]
    return "\n".join([*lines, *map(_row, records)])


def _row(record: Record) -> str:
    count, after = record.get("parameters"), record.get("double_parameters")
    cells = [
        f"`{record['name']}`",
        record.get("family") or record.get("task", ""),
        str(record.get("image", "")),
        f"{count / 1e6:.1f}M" if count else "",
        f"{record['share']:.0%}" if "share" in record else "",
        f"{record['error']:.0e}" if record.get("exact") is True else "no",
        *("yes" if record.get(step) is True else "no" for step in list(_TITLES)[1:]),
        f"{after / count:.0%}" if count and after else "",
    ]
    return f"| {' | '.join(cells)} |"


def _one_line(fault: str) -> str:
    return " ".join(_COLOUR.sub("", str(fault)).split())[:300].replace("|", "\\|")
