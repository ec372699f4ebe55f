"""Cells -> the tables of docs/experiments.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cells import DATASETS, DEFAULT, MODELS, PAPER, Cell, label, mean, pick
from protocol import FRAMEWORKS, INSIDE, ROWS, START, VARIANTS

NOT_RUN, NONE = "not run", ""
NOTHING_PASSED, LONGER = "nothing passed", "longer"
SEARCHED = tuple(name for name in ROWS if name not in (FRAMEWORKS[0], START))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def millions(count: float) -> str:
    return f"{count / 1e6:.2f}M"


def giga(macs: float) -> str:
    return f"{macs / 1e9:.3f}G"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def points(share: float) -> str:
    """A difference of accuracies in percentage points; never a negative zero."""
    return f"{100 * share + 0.0:.1f}".replace("-0.0", "0.0")


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The range of the values of several seeds, if they differ.

    >>> spread([0.1, 0.1], percent), spread([0.1, 0.2], percent)
    ('', '; 10.0% to 20.0%')
    """
    low, high = form(min(values)), form(max(values))
    return "" if low == high else f"; {low} to {high}"


def bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


# Tables 1 to 3


def accuracy_text(cells: Sequence[Cell]) -> str:
    """The test accuracy with its 95 % interval, or with the range if there are several seeds."""
    accuracies = [cell.result["test_accuracy"] for cell in cells]
    if len(cells) > 1:
        return percent(mean(accuracies)) + spread(accuracies, percent)
    low, high = cells[0].result["test_interval"]
    return f"{percent(accuracies[0])} [{100 * low:.1f}, {100 * high:.1f}]"


def drop_text(cells: Sequence[Cell]) -> str:
    """The points lost on validation and test images; for a single seed, the latter with its 95 % interval."""
    val, test = (mean(drops) for drops in zip(*(cell.drops for cell in cells), strict=True))
    text = f"{points(val)} / {points(test)}"
    interval = cells[0].result.get("test_drop_interval")
    if len(cells) == 1 and interval:
        return f"{text} [{points(interval[0])}, {points(interval[1])}]"
    return text + spread([cell.drops[1] for cell in cells], points)


def size_text(cells: Sequence[Cell], field: str, form: Callable[[float], str]) -> str:
    """Parameters or multiply-adds, and the share of the unpruned network's that was removed."""
    sizes = [cell.result[field] for cell in cells]
    removed = mean(1 - cell.result[field] / cell.baseline[field] for cell in cells)
    return f"{form(mean(sizes))} ({percent(removed)}){spread(sizes, form)}"


def paper_cells(dataset: str, model: str, framework: str) -> list[str]:
    """The paper's numbers for a framework, empty if it has none. The best are bold."""
    block = PAPER["tables"][dataset][model]
    if framework not in block:
        return [NONE] * 3
    row, pruned = block[framework], [values for name, values in block.items() if name != "baseline"]
    texts = [f"{row['accuracy']}%"]
    for field, unit in (("parameters", "M"), ("flops", "G")):
        best = min(pruned, key=lambda values: (-values[f"{field}_pr"], values[field]))
        text = f"{row[field]:.2f}{unit} ({row[f'{field}_pr']}%)"
        texts.append(bold(text, row == best))
    return texts


def dataset_table(cells: Sequence[Cell], dataset: str) -> str:
    """One of Tables 1 to 3: our results and the peers', next to the paper's own numbers."""
    rows = []
    for model, name in MODELS.items():
        found = {framework: pick(cells, model, dataset, framework) for framework in ROWS}
        ran = {framework: found[framework] for framework in SEARCHED if found[framework]}
        for framework, runs in found.items():
            if framework in INSIDE and not runs:
                continue
            texts = [NOT_RUN] + [NONE] * 3
            if framework in ran and not any(cell.pruned for cell in runs):
                texts[0] = NOTHING_PASSED
            elif runs:
                texts = [accuracy_text(runs), NONE if framework == FRAMEWORKS[0] else drop_text(runs)]
                for field, form in (("parameters", millions), ("macs", giga)):
                    text = size_text(runs, field, form)
                    texts.append(bold(text, framework in ran and _is_best(ran, framework, field)))
            title = f"**{name}**" if framework == FRAMEWORKS[0] else label(framework)
            rows.append([title, *texts, *paper_cells(dataset, model, framework)])
    ours = ("Framework", "Accuracy", "Drop, val / test", "Parameters (PR)", "FLOPs (PR)")
    return table((*ours, "Paper: accuracy", "Paper: parameters (PR)", "Paper: FLOPs (PR)"), rows)


def _is_best(ran: dict[str, list[Cell]], framework: str, field: str) -> bool:
    shared = shared_seeds(ran.values())
    sizes = {name: mean(c.result[field] for c in runs if c.seed in shared) for name, runs in ran.items() if shared}
    return bool(sizes) and sizes[framework] == min(sizes.values())


def shared_seeds(groups: Iterable[Sequence[Cell]]) -> set[int]:
    """The seeds that all groups were run with; only these can be compared."""
    seeds = [{cell.seed for cell in group} for group in groups]
    return set.intersection(*seeds) if seeds else set()


# What must hold


@dataclass(frozen=True)
class Bar:
    """A claim: `ours` keeps at most `most` (or, if `strictly`, less) of the parameters of the best of `rivals`."""

    ours: str
    rivals: tuple[str, ...]
    most: float = 1.0
    strictly: bool = False

    @property
    def title(self) -> str:
        rivals = label(self.rivals[0]) if len(self.rivals) == 1 else "the best filter pruning"
        return f"{label(self.ours)} over {rivals}"

    @property
    def limit(self) -> str:
        return f"{'<' if self.strictly else '≤'} {self.most:g}"

    def holds(self, ratio: float) -> bool:
        return ratio < self.most if self.strictly else ratio <= self.most


BARS = (
    Bar("basis+taylor", ("l1", "taylor", "hrank", "torch-pruning magnitude", "torch-pruning taylor"), 0.6),
    Bar("basis+taylor", ("basis",)),
    Bar("basis", ("truncated svd",), strictly=True),
)


@dataclass(frozen=True)
class Verdict:
    """The outcome for a bar: the columns from the sizes on, whether it holds (None: unknown), and our cell."""

    texts: list[str]
    holds: bool | None = None
    ours: Cell | None = None


def judge(cells: Sequence[Cell], bar: Bar, dataset: str, model: str) -> Verdict:
    """Both sizes, their ratio here and in the paper, the points lost on the test images, and whether the bar holds."""
    ran = {cell.framework: cell for cell in cells}
    paper = {name: row["parameters"] for name, row in PAPER["tables"][dataset][model].items()}
    known = [paper[name] for name in bar.rivals if name in paper]
    printed = f"{paper[bar.ours] / min(known):.2f}" if known else NONE
    missing = [label(name) for name in (bar.ours, *bar.rivals) if name not in ran]
    if missing:
        return Verdict([NONE, NONE, NONE, printed, NONE, bar.limit, f"{NOT_RUN}: {', '.join(missing)}"])
    best = min(bar.rivals, key=lambda name: ran[name].result["parameters"])
    ours, theirs = ran[bar.ours], ran[best]
    ratio = ours.result["parameters"] / theirs.result["parameters"]
    holds = bar.holds(ratio)
    texts = [
        millions(ours.result["parameters"]),
        f"{millions(theirs.result['parameters'])} ({label(best) if theirs.pruned else NOTHING_PASSED})",
        f"{ratio:.2f}",
        printed,
        f"{points(ours.drops[1])} / {points(theirs.drops[1])}",
        bar.limit,
        "pass" if holds else "**fail**",
    ]
    return Verdict(texts, holds, ours)


def verdicts(cells: Sequence[Cell], model: str = "resnet50") -> str:
    """Whether the bars hold on each dataset, for each seed separately, and with twice the epochs if that was run."""
    rows, judged = [], []
    for dataset, name in DATASETS.items():
        for variant in (DEFAULT, LONGER):
            runs = pick(cells, model, dataset, variant=variant)
            for seed in sorted({cell.seed for cell in runs}) or [0] * (variant == DEFAULT):
                of_seed = [cell for cell in runs if cell.seed == seed]
                for bar in BARS:
                    judged.append(judge(of_seed, bar, dataset, model))
                    passes = str(of_seed[0].config["recipe"]["finetune"]["epochs"]) if of_seed else NONE
                    rows.append([name, str(seed), passes, bar.title, *judged[-1].texts])
    outcomes = [verdict.holds for verdict in judged]
    counts = (
        f"{outcomes.count(True)} hold, {outcomes.count(False)} do not, {outcomes.count(None)} cannot be decided yet."
    )
    held = [verdict.ours for verdict in judged if verdict.holds and verdict.ours]
    beyond = sum(ours.drops[1] > ours.limit for ours in held)
    note = (
        f"In {beyond} of those that hold, ours lost more on the test images than the limit for the validation images."
    )
    sizes = ("Parameters of", "Ours", "Theirs", "Ratio", "Paper's ratio")
    header = ("Dataset", "Seed", "Epochs", *sizes, "Points lost on test", "Bar", "Verdict")
    return f"{table(header, rows)}\n\nOf {len(rows)} comparisons on {MODELS[model]}, {counts} {note}"


def longer(cells: Sequence[Cell], model: str = "resnet50") -> str:
    """What the frameworks that were also run with twice the epochs keep, next to what they keep otherwise."""
    rows = []
    for dataset, name in DATASETS.items():
        for framework in SEARCHED:
            both = [pick(cells, model, dataset, framework, variant) for variant in (DEFAULT, LONGER)]
            shared = shared_seeds(both)
            if shared:
                same = [[cell for cell in runs if cell.seed in shared] for runs in both]
                rows.append([name, label(framework), *(text for runs in same for text in _kept_and_lost(runs))])
    columns = ("Parameters (PR)", "Drop, val / test", "Parameters, twice the epochs", "Drop, val / test")
    return table(("Dataset", "Framework", *columns), rows) if rows else "Not run."


def _kept_and_lost(runs: Sequence[Cell]) -> tuple[str, str]:
    if not any(cell.pruned for cell in runs):
        return NOTHING_PASSED, NONE
    return size_text(runs, "parameters", millions), drop_text(runs)


# Ablations


def ablations(cells: Sequence[Cell], model: str = "resnet50") -> str:
    """Each variant of the recipe at the same ratio: accuracy right after pruning and after tuning, and size."""
    rows = []
    for ratio in sorted({cell.result["ratio"] for cell in cells}):
        of_ratio = [cell for cell in cells if cell.result["ratio"] == ratio]
        for variant in VARIANTS:
            runs = [pick(of_ratio, model, dataset, "basis", variant) for dataset in DATASETS]
            if any(runs):
                rows.append([percent(ratio), variant, *map(_ablation_text, runs)])
    return table(("Removed", "Variant", *DATASETS.values()), rows)


def _ablation_text(runs: Sequence[Cell]) -> str:
    if not runs:
        return NOT_RUN
    fields = ("untuned_val_accuracy", "val_accuracy", "test_accuracy", "parameters", "macs")
    before, val, test, parameters, macs = (mean(cell.result[field] for cell in runs) for field in fields)
    return f"{percent(before)} → {percent(val)}, {percent(test)}; {millions(parameters)}, {giga(macs)}"


# What was run


def settings(cells: Sequence[Cell]) -> str:
    """The settings that all frameworks share; several values if the cells differ. Some settings of the peers differ."""

    def values(*keys: str) -> str:
        distinct = dict.fromkeys(_text(_inside(cell.config, keys)) for cell in plain)
        return " or ".join(distinct)

    def several(*keys: str, of: Sequence[str] = ()) -> str:
        return ", ".join(values(*of, key) for key in keys)

    plain = [cell for cell in cells if cell.variant == DEFAULT and cell.framework in FRAMEWORKS] or list(cells)
    train, tune, search = ("recipe", "train"), ("recipe", "finetune"), ("search",)
    rows = [
        ("images for training, validation, test", several("images", "val_images", "test_images")),
        ("image size after enlarging", f"{values('side')} pixels"),
        ("training epochs of the unpruned network", values(*train, "epochs")),
        ("epochs per candidate, at most", values(*tune, "epochs")),
        ("batch size, optimiser, learning rate", several("batch_size", "optimizer", "lr", of=train)),
        ("mixed precision, BN statistics", several("mixed_precision", "norm_statistics", of=train)),
        ("basis, initial scaling factors", several("basis", "scale_init", of=("recipe",))),
        (
            "validation images set aside for the scores, batch size",
            several("score_images", "score_batch", of=("recipe",)),
        ),
        ("compensation for pruned basis vectors", values("recipe", "compensate")),
        ("budget", " or ".join(dict.fromkeys(_budget_text(cell.config["budget"]) for cell in plain))),
        ("search: step, tolerance, smallest share", several("step", "tolerance", "smallest", of=search)),
        ("search: warm start, final polish", several("warm_start", "polish", of=search)),
        ("seeds", ", ".join(map(str, sorted({cell.seed for cell in cells})))),
        ("machine", " or ".join(dict.fromkeys(cell.device for cell in cells))),
        ("versions", " or ".join(dict.fromkeys(", ".join(map(" ".join, c.versions.items())) for c in cells))),
    ]
    return table(("setting", "value"), rows)


def _budget_text(budget: Mapping[str, Any]) -> str:
    if budget["max_drop"] is not None:
        return f"at most {points(budget['max_drop'])} points lost"
    return f"an accuracy of at least {percent(budget['min_accuracy'])}"


def _inside(config: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        config = config[key]
    return config


def _text(value: Any) -> str:
    if value is None:
        return "all"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def efforts(cells: Sequence[Cell]) -> str:
    """How many candidates each search tried, and how many epochs of training they took in total."""
    rows = []
    for model, name in MODELS.items():
        for framework in SEARCHED:
            runs = [pick(cells, model, dataset, framework) for dataset in DATASETS]
            if any(runs):
                rows.append([name, label(framework), *map(_effort_text, runs)])
    chosen = [cell for cell in cells if cell.variant == DEFAULT and cell.candidates]
    undecided = [cell.result["undecided"] for cell in chosen if cell.pruned]
    note = (
        f"In {len(chosen) - len(undecided)} of {len(chosen)} searches nothing passed. Of the other {len(undecided)} "
        f"networks, {sum(undecided)} are undecided: the 95% interval of their drop on the validation images "
        "contains the limit."
    )
    return f"{table(('Network', 'Framework', *DATASETS.values()), rows)}\n\n{note}"


def _effort_text(runs: Sequence[Cell]) -> str:
    if not runs:
        return NOT_RUN
    tried, passes = (mean(values) for values in zip(*((len(c.candidates) - 1, c.passes) for c in runs), strict=True))
    return f"{tried:.3g} candidates, {passes:.3g} epochs"


def table4(counts: dict[str, Any]) -> str:
    """Total and trainable parameters of the decomposed networks, ours and those printed in the paper."""
    rows = [
        (
            name,
            millions(counts[model]["total"]),
            f"{PAPER['table4'][model]['total_millions']:.2f}M",
            f"{counts[model]['trainable'] / 1e3:.2f}k",
            f"{PAPER['table4'][model]['trainable_thousands']:.2f}k",
        )
        for model, name in MODELS.items()
    ]
    return table(("Model", "Total", "Paper: total", "Trainable", "Paper: trainable"), rows)
