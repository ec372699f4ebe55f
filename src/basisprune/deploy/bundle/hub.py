"""A bundle on the hub: its model card, a page that classifies photos in the browser, and the push."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import EvalResult, HfApi, ModelCardData
from pydantic import JsonValue

from basisprune.deploy.bundle.config import Config
from basisprune.deploy.bundle.loading import CARD, FILES, Bundle, read_folder
from basisprune.deploy.export import export_onnx
from basisprune.errors import BasisPruneError, BundleError, ConfigError
from basisprune.files import current, digest, read_bytes
from basisprune.types import dotted

_SPECIAL = re.compile(r"([\\`*_{}\[\]()|~$@:]|(?<=www)\.)", re.IGNORECASE)  # what Markdown takes for more than itself
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
_DATASET = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)

_KINDS = {"segmentation": "image-segmentation"}  # what the hub calls tasks that are no classification
ONNX, APP, REQUIREMENTS = "model.onnx", "app.py", "requirements.txt"
_PACKAGES = b"gradio\nnumpy\nonnxruntime\npillow\n"


@dataclass(frozen=True)
class Card:
    """What only you know of a network that goes to the hub.

    Attributes:
        license: One of the hub's names, such as "apache-2.0".
        datasets: Ids of datasets on the hub.
        page: Whether a page that classifies photos goes with it; by default if the network can be written as ONNX.
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
    """Return the README.md of a bundle: what the network is, its metrics, how to use it; names are escaped."""
    rows = [f"| {escaped(name)} | {escaped(value)} |" for name, value in dotted(config.metrics)]
    names = [escaped(name) for name in config.classes or ()]
    classes = f"- classes ({len(names)}): {', '.join(names)}\n" if names else ""
    page = """
For a page in the browser that classifies photos, without torch: `pip install -r requirements.txt`, then
`python app.py`. It runs `model.onnx`, which any other runtime for ONNX runs too.
"""
    return f"""---
{_front(config, card or Card(), repo_id).to_yaml()}
---

# {escaped(config.architecture.backbone or "A network")}, made small by basisprune

- input: {" x ".join(map(str, config.input.shape))}
{classes}{"".join(f"- {escaped(name)} {escaped(number)}{chr(10)}" for name, number in config.versions.items())}
## Metrics

{chr(10).join(["| metric | value |", "|---|---|", *rows] if rows else ["No metrics were given."])}

## Use

```python
from basisprune import from_pretrained

model = from_pretrained("{repo_id}")  # or a local folder
```
{page if has_page else ""}"""


def escaped(value: object) -> str:
    """Return the value on one line of Markdown, which shows it letter by letter and nothing else.

    >>> print(escaped("<b>[x](y)"))
    &lt;b&gt;\\[x\\]\\(y\\)
    """
    line = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return html.escape(_SPECIAL.sub(r"\\\1", line), quote=False)


def _front(config: Config, card: Card, repo_id: str) -> ModelCardData:
    kind = _KINDS.get(str(config.metrics["task"])) if "task" in config.metrics else "image-classification"
    dataset = card.datasets[0] if card.datasets else None
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=dataset or "imagefolder",
            dataset_name=f"{dataset or 'its own images'}, {part}",
            metric_type="accuracy",
            metric_name="accuracy, 95% interval {:.1%} to {:.1%}".format(*interval) if interval else "accuracy",
            metric_value=value,
            metric_args={"confidence": 0.95, "interval": list(interval)} if interval else None,
        )
        for part, value, interval in (() if "task" in config.metrics else _accuracies(config.metrics))
    ]
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


def _accuracies(metrics: Mapping[str, JsonValue]) -> Iterator[tuple[str, float, tuple[float, float] | None]]:
    """The accuracies among the metrics of a bundle, each with the images it is on and, if known, its interval."""
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


def page_files(bundle: Bundle, folder: Path | None, *, wanted: bool | None) -> dict[str, bytes]:
    """Return the files of the page by name: the network as ONNX, the program, and the packages that it needs.

    The ONNX file is the one beside the bundle's folder if its run noted that checksum, or else made from the network;
    the program reads the names of the classes from it. Where there is none and none can be made, raises BundleError if
    `wanted`; if that is None, there is no page then.
    """
    if wanted is False:
        return {}
    model = _delivered(bundle, folder)
    try:
        if model is None:
            if bundle.input_spec is None:
                raise BundleError("the network does not know how its images are prepared; save it with an input_spec")
            with TemporaryDirectory() as scratch:
                path, spec = Path(scratch) / ONNX, bundle.input_spec
                export_onnx(bundle.model, path, classes=bundle.classes, preprocess=True, input_spec=spec)
                model = path.read_bytes()
    except BasisPruneError as error:
        if wanted is None:
            return {}
        raise BundleError(f"the page cannot be made: {error}") from error
    program = resources.files(__package__).joinpath("templates/app.py.txt").read_bytes()
    return {ONNX: model, APP: program, REQUIREMENTS: _PACKAGES}


def _delivered(bundle: Bundle, folder: Path | None) -> bytes | None:
    """The ONNX file that the run of the bundle delivered with it, if it is there and sound."""
    sums = bundle.metrics.get("sha256")
    noted = sums.get(ONNX) if isinstance(sums, dict) else None
    if folder is None or noted is None:
        return None
    try:
        content = read_bytes(folder.resolve().parent / ONNX)
    except OSError:
        return None
    return content if digest(content) == noted else None


def push_folder(
    folder: Path, card: Card, more: Mapping[str, bytes], repo_id: str, *, private: bool, token: str | None, message: str
) -> str:
    """Upload a bundle's files as they are, `more` files and a card for its place there; return the commit's URL."""
    config = read_folder(folder).config
    files = {name: current(folder, name).read_bytes() for name in FILES}  # which have checksums
    own = current(folder, CARD)
    is_edited = own.is_file() and not own.is_symlink() and own.read_text(errors="replace") != model_card(config)
    text = model_card(config, card, repo_id=repo_id, has_page=bool(more)).encode()
    files |= {**more, CARD: own.read_bytes() if is_edited else text}  # a link would publish another file
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with TemporaryDirectory() as scratch:
        for name, content in files.items():
            (Path(scratch) / name).write_bytes(content)
        return str(api.upload_folder(repo_id=repo, folder_path=scratch, commit_message=message).commit_url)
