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
        rows.append((cell, str(found["candidates"]), *numbers))
    note = (
        "EfficientNet-Lite0 at 32x32, a budget of one point, judged by the validation images. Where shares are halved, "
        "the tuning of a candidate ends as soon as it passes; `benchmarks/search.py`."
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
        "At 32x32, images but digits mirrored in training, 65 % of the filters and then of the basis vectors removed, "
        "accuracy on 5,000 test images; the seconds are those of pruning and tuning; `benchmarks/best.py`."
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
        "The recipe `quick` at 32x32, half of the filters and then of the basis vectors removed: accuracy on 5,000 "
        "test images with the weights that the tuning ends with, and how many points more with their moving average "
        "of that decay; `benchmarks/averages.py`."
    )
    return f"{table(('network, data', 'last', *decays), rows)}\n\n{note}"
