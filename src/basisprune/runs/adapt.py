"""A pretrained model adapted to images, and nothing removed: the first stage alone, with a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from basisprune.costs import measure
from basisprune.data import LabelledImages
from basisprune.deploy.bundle import save_pretrained
from basisprune.files import write_text
from basisprune.pipeline import Pipeline
from basisprune.recipes import Recipe
from basisprune.runs.compress import starting_point
from basisprune.runs.settings import ResultFolder, recipe_of
from basisprune.runs.summary import versions
from basisprune.training.intervals import wilson_interval
from basisprune.training.loop import fit
from basisprune.training.predict import predict


def adapt(
    model: str,
    data: str,
    output: str | Path,
    *,
    recipe: str | Mapping[str, Any] | Recipe = "quick",
    epochs: int | None = None,
    seed: int = 0,
    input_size: int | None = None,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
    **start: Any,
) -> dict[str, Any]:
    """What is known of the model that was trained, as JSON values; the output folder holds it, and the model.

    A run that was killed goes on. `start` goes to `starting_point`. Raises CheckpointError for an output that
    belongs to a run with other settings, weights or images.
    """
    folder = Path(output)
    training = replace(recipe_of(recipe).train, seed=seed)
    training = training if epochs is None else replace(training, epochs=epochs)
    config = {"model": model, "data": data, "size": input_size, "seed": seed, **start}
    config["recipe"] = {"train": asdict(training)}
    network, splits = starting_point(model, data, input_size=input_size, seed=seed, **start)
    for line in ResultFolder(folder, "train").claim(config, versions()):
        say(f"{folder} was begun with another version, and goes on with this one: {line}")
    # The same names may stand for other weights or images; training, unlike pruning, can do without validation.
    Pipeline(network, replace(splits, val=splits.val or splits.train), checkpoints=folder).claim_folder()
    say(splits.describe())
    say(f"training for {training.epochs} epochs")
    trained = fit(network, splits.train, splits.val, training, checkpoint=folder / "training.pt")
    size = measure(trained.model)
    summary: dict[str, Any] = {
        "command": command,
        "config": config,
        "seed": seed,
        "versions": versions(),
        "classes": list(splits.classes),
        "parameters": size.parameters,
        "macs": size.macs,
        "history": [asdict(record) for record in trained.history],
    }
    for name, part in (("validation", splits.val), ("test", splits.test)):
        if part is not None:
            summary[name] = _accuracy(trained.model, part, prepared=training.prepared)
    metrics: dict[str, Any] = {name: summary[name] for name in ("validation", "test") if name in summary}
    save_pretrained(trained.model, folder / "model", classes=splits.classes, metrics=metrics)
    write_text(folder / "summary.json", json.dumps(summary) + "\n")
    return summary


def _accuracy(model: Any, data: LabelledImages, *, prepared: bool) -> dict[str, Any]:
    hits = predict(model, data, prepared=prepared).hits
    low, high = wilson_interval(int(hits.sum()), len(hits))
    return {"accuracy": float(hits.mean()), "interval": [low, high], "images": len(hits)}
