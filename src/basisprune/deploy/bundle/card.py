"""The model card of a bundle: what the hub shows and searches, and what people read."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from huggingface_hub import EvalResult, ModelCardData
from pydantic import JsonValue

from basisprune.deploy.bundle.config import Config
from basisprune.errors import ConfigError
from basisprune.types import dotted

_SPECIAL = re.compile(r"([\\`*_{}\[\]()|~$@:]|(?<=www)\.)", re.IGNORECASE)  # what Markdown takes for more than itself
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
_DATASET = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)

_KINDS = {"segmentation": "image-segmentation"}  # what the hub calls tasks that are no classification


@dataclass(frozen=True)
class Card:
    """What only you know of a network that goes to the hub.

    `license` is one of the hub's names, such as "apache-2.0"; `datasets` are ids of datasets there. `page` says whether
    a page that classifies photos goes with it; by default it does if the network can be written as ONNX.
    """

    license: str = "unknown"
    datasets: tuple[str, ...] = ()
    page: bool | None = None

    def __post_init__(self) -> None:
        faults = []
        if not isinstance(self.license, str) or not _LICENCE.fullmatch(self.license):
            faults.append(f"license: {self.license!r} given, a name of the hub such as 'apache-2.0' is needed")
        faults += [
            f"datasets: {name!r} given, the id of a dataset on the hub such as 'mnist' or 'owner/name' is needed"
            for name in self.datasets
            if not isinstance(name, str) or not _DATASET.fullmatch(name)
        ]
        if faults:
            raise ConfigError.of("Card", faults)


def model_card(config: Config, card: Card | None = None, *, repo_id: str = "owner/name", has_page: bool = False) -> str:
    """The text of README.md for a bundle with this config: what the network is, its metrics, how to use it.

    Whatever is not ours, such as the names of classes, is written so that Markdown and HTML show it as it is.
    """
    rows = [f"| {escaped(name)} | {escaped(value)} |" for name, value in dotted(config.metrics)]
    table = ["| metric | value |", "|---|---|", *rows] if rows else ["No metrics were given."]
    names = [escaped(name) for name in config.classes or ()]
    page = [
        "",
        "For a page in the browser that classifies photos, without torch: `pip install -r requirements.txt`, then",
        "`python app.py`. It runs `model.onnx`, which any other runtime for ONNX runs too.",
    ]
    return "\n".join(
        [
            f"---\n{_front(config, card or Card(), repo_id).to_yaml()}\n---",
            "",
            f"# {escaped(config.architecture.backbone or 'A network')}, made small by basisprune",
            "",
            f"- input: {' x '.join(map(str, config.input.shape))}",
            *([f"- classes ({len(names)}): {', '.join(names)}"] if names else []),
            *(f"- {escaped(name)} {escaped(number)}" for name, number in config.versions.items()),
            "",
            "## Metrics",
            "",
            *table,
            "",
            "## Use",
            "",
            "```python",
            "from basisprune import from_pretrained",
            "",
            f'model = from_pretrained("{repo_id}")  # or a local folder',
            "```",
            *(page if has_page else []),
            "",
        ]
    )


def escaped(value: object) -> str:
    """The value on one line of Markdown, which shows it letter by letter and nothing else.

    >>> print(escaped("<b>[x](y)"))
    &lt;b&gt;\\[x\\]\\(y\\)
    """
    line = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return html.escape(_SPECIAL.sub(r"\\\1", line), quote=False)


def _front(config: Config, card: Card, repo_id: str) -> ModelCardData:
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=card.datasets[0] if card.datasets else "imagefolder",
            dataset_name=f"{card.datasets[0] if card.datasets else 'its own images'}, {part}",
            metric_type="accuracy",
            metric_name=f"accuracy, 95 % interval {low:.1%} to {high:.1%}" if interval else "accuracy",
            metric_value=value,
            metric_args={"confidence": 0.95, "interval": list(interval)} if interval else None,
        )
        for part, value, interval in (() if "task" in config.metrics else accuracies(config.metrics))
        for low, high in [interval or (0.0, 0.0)]
    ]
    kind = _KINDS.get(str(config.metrics["task"])) if "task" in config.metrics else "image-classification"
    return ModelCardData(
        license=card.license,
        library_name="basisprune",
        pipeline_tag=kind,
        tags=["basisprune", "compression", "pruning", *([kind] if kind else [])],
        datasets=list(card.datasets) or None,
        metrics=["accuracy"] if results else None,
        model_name=repo_id.partition("/")[2] if results else None,
        eval_results=results or None,
    )


def accuracies(metrics: Mapping[str, JsonValue]) -> Iterator[tuple[str, float, tuple[float, float] | None]]:
    """The accuracies among the metrics of a bundle, each with the images it is on and, if known, its interval.

    >>> list(accuracies({"accuracy": 0.9, "validation": {"accuracy": 0.8, "interval": [0.7, 0.9]}}))
    [('images', 0.9, None), ('validation images', 0.8, (0.7, 0.9))]
    """
    test = metrics.get("test")
    places = {
        "images": metrics,
        "test images": test.get("after", test) if isinstance(test, dict) else None,
        "validation images": metrics.get("validation"),
    }
    for part, found in places.items():
        value = found.get("accuracy") if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or not _is_share(value):
            continue
        interval = found.get("interval")
        known = isinstance(interval, list) and len(interval) == 2 and all(map(_is_share, interval))
        yield part, float(value), (float(interval[0]), float(interval[1])) if known else None  # type: ignore[arg-type,index]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
