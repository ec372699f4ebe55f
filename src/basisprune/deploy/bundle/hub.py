"""Bundles on the Hugging Face hub: fetched, pushed, and described by a model card."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download

from basisprune.deploy.bundle.files import CONFIG, NAMES
from basisprune.errors import BundleError
from basisprune.types import dotted

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def fetch(folder: str | Path, revision: str | None = None) -> tuple[Path, bool]:
    """The local folder of a bundle, and whether it came from the hub.

    Raises BundleError if there is neither such a folder nor such a model.
    """
    if Path(folder).is_dir():
        return Path(folder), False
    if not isinstance(folder, str) or not HUB_ID.fullmatch(folder):
        raise BundleError(f"{folder}: no such folder; pass one that save_pretrained wrote, or a hub id 'owner/name'")
    try:
        return Path(snapshot_download(folder, revision=revision, allow_patterns=sorted(NAMES))), True
    except Exception as error:  # the network fails in many ways
        raise BundleError(
            f"{folder}: no such folder, and the hub does not give it ({type(error).__name__}: {error})"
        ) from error


class HubFolder(ModelHubMixin):
    """A bundle's folder for `push_to_hub` of huggingface_hub's mixin, which takes over its files as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save_pretrained(self, save_directory: Path) -> None:
        for name in sorted(NAMES):
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, save_directory / name)

    def generate_model_card(self, *_args: Any, **_kwargs: Any) -> ModelCard:
        """The card for a folder that has lost its own."""
        return ModelCard(model_card(json.loads((self.folder / CONFIG).read_bytes())))


def model_card(config: Mapping[str, Any]) -> str:
    """The text of README.md for a bundle with this config: what the network is, its metrics, how to use it.

    >>> config = {"architecture": {"backbone": "resnet18"}, "classes": ["cat", "dog"], "metrics": {"accuracy": 0.9}}
    >>> "| accuracy | 0.9 |" in model_card({**config, "input": {"shape": [3, 64, 64]}, "versions": {}})
    True
    """
    classes = config["classes"]
    tags = ["basisprune", "compression", "pruning"]
    about = ModelCardData(library_name="basisprune", pipeline_tag="image-classification", tags=tags)
    rows = [f"| {name} | {value} |" for name, value in dotted(config["metrics"])]
    table = ["| metric | value |", "|---|---|", *rows] if rows else ["No metrics were given."]
    return "\n".join(
        [
            f"---\n{about.to_yaml()}\n---",
            "",
            f"# {config['architecture']['backbone'] or 'A network'}, made small by basisprune",
            "",
            f"- input: {' x '.join(map(str, config['input']['shape']))}",
            *([f"- classes ({len(classes)}): {', '.join(classes)}"] if classes else []),
            *(f"- {name} {number}" for name, number in config["versions"].items()),
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
            'model = from_pretrained("owner/name")  # or a local folder',
            "```",
            "",
        ]
    )
