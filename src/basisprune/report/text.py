"""Plain text tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from basisprune.costs import ModelReport
from basisprune.errors import printable
from basisprune.method.states import Pruned
from basisprune.report.html import amount, change, comparison, exact
from basisprune.results import RunSummary, RuntimeRow

_NUMBERS = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?( [-+]?[0-9.]+(e[-+]?[0-9]+)?)*")


def layer_table(report: ModelReport) -> str:
    """Format a table of every layer: kind, rank of full rank, parameters, multiply-adds."""
    rows = [
        (
            layer.name or "(root)",
            layer.kind,
            f"{layer.full_rank if layer.rank is None else layer.rank}/{layer.full_rank}",
            f"{layer.parameters:,}",
            f"{layer.macs:,}",
            layer.note or ("" if layer.rank is not None else "not decomposed"),
        )
        for layer in report.layers
    ]
    inside = sum(layer.parameters for layer in report.layers)
    rows.append(("(norms and others)", "", "", f"{report.parameters - inside:,}", "", ""))
    rows.append(("total", "", "", f"{report.parameters:,}", f"{report.macs:,}", f"input {report.input_shape}"))
    return text_table(("layer", "kind", "rank", "parameters", "multiply-adds", "note"), rows, left={0, 1, 5})


def framework_table(results: Sequence[Pruned]) -> str:
    """Format a table that compares the results of frameworks: test accuracy or metric, parameters, multiply-adds.

    The share removed is relative to the first one.
    """
    finals = [result.stages[-1] for result in results]
    rows = [
        (
            result.framework,
            format(
                final.accuracy if result.test_accuracy is None else result.test_accuracy,
                ".1%" if result.is_share else ".4g",
            ),
            f"{final.parameters / 1e6:.3f}M",
            f"{1 - final.parameters / finals[0].parameters:.1%}",
            f"{final.macs / 1e6:.2f}M",
            f"{1 - final.macs / finals[0].macs:.1%}",
        )
        for result, final in zip(results, finals, strict=True)
    ]
    metric = results[0].metric if results else "accuracy"
    header = ("framework", metric, "parameters", "removed", "multiply-adds", "removed")
    return text_table(header, rows, left={0})


def comparison_table(summary: RunSummary) -> str:
    """Format a before-and-after table: accuracies, parameters, multiply-adds, latency, file size."""
    rows = [
        (row.label, exact(row.before, row.key), exact(row.after, row.key), change(row)) for row in comparison(summary)
    ]
    return text_table(("", "before", "after", "change"), rows, left={0})


def runtime_table(rows: Sequence[RuntimeRow]) -> str:
    """Format a table of a network in several runtimes: file, size, difference from PyTorch, accuracy, latency."""
    cells = [
        (
            row.title,
            row.file or "-",
            amount(row.bytes, "bytes"),
            f"{row.difference:.1g}" if row.file else "-",
            "-" if row.accuracy is None else f"{row.accuracy:.1%}",
            f"{row.latency_ms:.2f} ms",
        )
        for row in rows
    ]
    header = ("runtime", "file", "size", "difference", "accuracy", "one image")
    return text_table(header, cells, left={0, 1})


def csv_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV, in which no text is a formula to a spreadsheet, nor anything but text to a terminal.

    >>> print(csv_table(("class", "share"), [("=1+1", -0.5), ("a\\tb", None)]))
    class,share
    '=1+1,-0.5
    a\\tb,
    <BLANKLINE>
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_csv_cell(value) if isinstance(value, str) else value for value in row] for row in rows)
    return file.getvalue()


def _csv_cell(text: str) -> str:
    """Put an apostrophe before what a spreadsheet would compute."""
    begins = text[:1] in ("\t", "\r", "\n") or text.lstrip()[:1] in tuple("=+-@\uff1d\uff0b\uff0d\uff20")
    return f"'{printable(text)}" if begins and text and not _NUMBERS.fullmatch(text) else printable(text)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: set[int]) -> str:
    """Align columns under a header; columns in `left` are left-aligned, the others right-aligned.

    >>> print(text_table(("name", "n"), [("a", "10"), ("bb", "2")], left={0}))
    name   n
    ----  --
    a     10
    bb     2
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
