"""Results -> the page: its blocks filled in, its figures written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from cells import DATASETS, MODELS, Cell, pick, read_cells
from figures import candidates_figure, order_table, scales_figure, scales_of
from sections import ablations, dataset_table, efforts, longer, settings, table4, verdicts


def write_page(results: Path, preset: str, page: Path) -> None:
    """Fills the page's blocks with tables of the preset's results, and writes the figures they refer to."""
    cells = read_cells(results / f"{preset}.jsonl")
    at_one_ratio = sorted(results.glob(f"{preset}-*.jsonl"))
    variants = tuple(cell for study in at_one_ratio for cell in read_cells(study))
    with_scales = (*variants, *cells)
    figures = draw_candidates(cells) | draw_scales(with_scales)
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, picture in figures.items():
        (folder / f"{name}.svg").write_text(picture)

    def shown(kind: str) -> str:
        paths = [f"{folder.name}/{name}.svg" for name in figures if name.startswith(kind)]
        return "\n\n".join(f"![{Path(path).stem}]({path})" for path in paths) or "Not run."

    counts = json.loads((results / "counts.json").read_text())
    tables = [f"### {name}\n\n{dataset_table(cells, dataset)}" for dataset, name in DATASETS.items()]
    blocks = {
        "settings": settings(cells),
        "efforts": efforts(cells),
        "verdicts": verdicts(cells),
        "longer": longer(cells),
        "tables": "\n\n".join(tables),
        "candidates": shown("candidates"),
        "ablations": ablations(variants),
        "scales": f"{shown('scales')}\n\n{order_table(with_scales)}",
        "table4": table4(counts),
    }
    page.write_text(fill(page.read_text(), blocks))


def draw_candidates(cells: Sequence[Cell]) -> dict[str, str]:
    """The figures of all candidates, by name."""
    return {
        f"candidates-{model}-{dataset}": candidates_figure(cells, model, dataset)
        for model in MODELS
        for dataset in DATASETS
        if any(cell.candidates for cell in pick(cells, model, dataset))
    }


def draw_scales(cells: Sequence[Cell]) -> dict[str, str]:
    """The paper's Figure 2 by name, for each network with enough cells."""
    return {f"scales-{model}": scales_figure(cells, model) for model in MODELS if scales_of(cells, model)}


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """The text with each block between its markers; exits and names the markers if any are missing.

    >>> fill("<!-- a:begin --> old <!-- a:end -->", {"a": "new"})
    '<!-- a:begin -->\\nnew\\n<!-- a:end -->'
    """
    missing = [
        mark for name in blocks for mark in (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") if text.count(mark) != 1
    ]
    if missing:
        raise SystemExit(f"the page must have each of these markers once: {', '.join(missing)}")
    for name, block in blocks.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"
    return text
