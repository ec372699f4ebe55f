"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence

from basisprune.costs import ModelReport
from basisprune.report.html import amount, change, comparison, exact
from basisprune.results import RunSummary, RuntimeRow
from basisprune.states import Pruned


def layer_table(report: ModelReport) -> str:
    """A text table of every layer: kind, rank of full rank, parameters, multiply-adds."""
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
    """A text table that compares the results of frameworks: test accuracy or metric, parameters, multiply-adds.

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
    """A before-and-after text table: accuracies, parameters, multiply-adds, latency, file size."""
    rows = [
        (row.label, exact(row.before, row.key), exact(row.after, row.key), change(row)) for row in comparison(summary)
    ]
    return text_table(("", "before", "after", "change"), rows, left={0})


def runtime_table(rows: Sequence[RuntimeRow]) -> str:
    """A text table of a network in several runtimes: file, size, difference from PyTorch, accuracy, latency."""
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


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: set[int]) -> str:
    """Aligned columns under a header; columns in `left` are left-aligned, the others right-aligned.

    >>> print(text_table(("name", "n"), [("a", "10"), ("bb", "2")], left={0}))
    name   n
    ----  --
    a     10
    bb     2
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
