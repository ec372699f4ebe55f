"""What docs/measured.md says about searches and about how long and how networks are tuned, from the JSON results."""

from __future__ import annotations

from statistics import mean

from common import load, table


def search_section() -> str:
    results = load("search")["results"]
    header = ("search", "candidates", "parameters", "points lost on the test images", "seconds")
    rows = []
    for cell, found in results.items():
        numbers = (f"{found['parameters']:,}", f"{100 * found['test drop']:.1f}", str(found["seconds"]))
        name = cell.replace("anew", "each from the unpruned").replace("the last,", "the last that passed,")
        rows.append((name, str(found["candidates"]), *numbers))
    note = (
        "EfficientNet-Lite0 at 32x32, a budget of one point on the validation images. Candidates are pruned from the "
        "last that passed, or each from the unpruned network. Where shares are halved, tuning ends as soon as a "
        "candidate passes (`benchmarks/search.py`)."
    )
    return f"{table(header, rows)}\n\n{note}"


def best_section() -> str:
    header = ("recipe", "unpruned", "pruned", "parameters", "passes", "seconds")
    rows = []
    for cell, found in load("best")["results"].items():
        passes = f"{found['passes of the unpruned']} + {found['passes of the pruned']}"
        accuracies = (f"{found[network]:.1%}" for network in ("unpruned", "pruned"))
        rows.append((cell, *accuracies, f"{found['parameters']:,}", passes, str(found["seconds"])))
    note = (
        "At 32x32, with 65% of the filters and then of the basis vectors removed; all images except digits are "
        "mirrored in training. Accuracy on 5,000 test images; seconds of pruning and tuning (`benchmarks/best.py`)."
    )
    return f"{table(header, rows)}\n\n{note}"


def averages_section() -> str:
    results = load("averages")["results"]
    decays = [name for name in next(iter(results.values())) if name != "last"]
    rows = [
        (cell, f"{found['last']:.1%}", *(f"{100 * (found[decay] - found['last']):+.1f}" for decay in decays))
        for cell, found in results.items()
    ]
    gains = {decay: mean(found[decay] - found["last"] for found in results.values()) for decay in decays}
    rows.append(("mean", "", *(f"{100 * gain:+.1f}" for gain in gains.values())))
    note = (
        "The recipe `quick` at 32x32, with half of the filters and then of the basis vectors removed: accuracy on "
        "5,000 test images with the final weights, and the points gained by a moving average with each decay "
        "(`benchmarks/averages.py`)."
    )
    return f"{table(('network, data', 'last', *decays), rows)}\n\n{note}"
