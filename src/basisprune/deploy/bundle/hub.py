"""Bundles on the Hugging Face hub: fetched, pushed, and described by a model card."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download

from basisprune.deploy.bundle.arguments import HUB_ID
from basisprune.deploy.bundle.config import Config
from basisprune.deploy.bundle.files import NAMES, read_folder
from basisprune.errors import BundleError
from basisprune.files import current, user_path
from basisprune.types import dotted

_SPECIAL = re.compile(r"([\\`*_{}\[\]()|~$@:]|(?<=www)\.)", re.IGNORECASE)  # what Markdown takes for more than itself


def fetch(folder: str | Path, revision: str | None = None) -> Path:
    """The local folder of a bundle; raises BundleError if there is no such folder and no such model on the hub."""
    path = user_path(folder, "load_bundle")
    if path.is_dir():
        return path
    if not isinstance(folder, str) or not HUB_ID.fullmatch(folder):
        raise BundleError(f"{folder}: no such folder; pass one that save_pretrained wrote, or a hub id 'owner/name'")
    try:
        return Path(snapshot_download(folder, revision=revision, allow_patterns=sorted(NAMES)))
    except Exception as error:  # the network fails in many ways
        raise BundleError(
            f"{folder}: no such folder, and the hub does not give it ({type(error).__name__}: {error})"
        ) from error


class HubFolder(ModelHubMixin):
    """A bundle's folder for `push_to_hub` of huggingface_hub's mixin, which takes over its files as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def push(self, repo_id: str, *, private: bool, token: str | None, message: str) -> str:
        """The address of the commit that holds the files."""
        commit = self.push_to_hub(repo_id, private=private, token=token, commit_message=message)
        return str(getattr(commit, "commit_url", commit))

    def _save_pretrained(self, save_directory: Path) -> None:
        for name in sorted(NAMES):
            if (found := current(self.folder, name)).exists():
                shutil.copyfile(found, save_directory / name)

    def generate_model_card(self, *_args: object, **_kwargs: object) -> ModelCard:
        """The card for a folder that has lost its own."""
        return ModelCard(model_card(read_folder(self.folder).config))


def model_card(config: Config) -> str:
    """The text of README.md for a bundle with this config: what the network is, its metrics, how to use it.

    Whatever is not ours, such as the names of classes, is written so that Markdown and HTML show it as it is.
    """
    tags = ["basisprune", "compression", "pruning"]
    about = ModelCardData(library_name="basisprune", pipeline_tag="image-classification", tags=tags)
    rows = [f"| {escaped(name)} | {escaped(value)} |" for name, value in dotted(config.metrics)]
    table = ["| metric | value |", "|---|---|", *rows] if rows else ["No metrics were given."]
    names = [escaped(name) for name in config.classes or ()]
    return "\n".join(
        [
            f"---\n{about.to_yaml()}\n---",
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
            'model = from_pretrained("owner/name")  # or a local folder',
            "```",
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
