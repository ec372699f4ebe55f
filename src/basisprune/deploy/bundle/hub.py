"""Bundles on the Hugging Face hub: fetched, and pushed with a card and a page."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download

from basisprune.deploy.bundle.arguments import HUB_ID
from basisprune.deploy.bundle.card import Card, model_card
from basisprune.deploy.bundle.files import CARD, NAMES, read_folder
from basisprune.errors import BundleError
from basisprune.files import current, user_path


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
    """A bundle's folder for `push_to_hub` of huggingface_hub's mixin, which takes over its files as they are.

    `more` are files that go with them; the card, too, is made for the place on the hub.
    """

    def __init__(self, folder: Path, card: Card | None = None, more: Mapping[str, bytes] | None = None) -> None:
        self.folder, self.card, self.more = folder, card, dict(more or {})
        self.repo_id = ""

    def push(self, repo_id: str, *, private: bool, token: str | None, message: str) -> str:
        """The address of the commit that holds the files."""
        self.repo_id = repo_id
        commit = self.push_to_hub(repo_id, private=private, token=token, commit_message=message)
        return str(getattr(commit, "commit_url", commit))

    def _save_pretrained(self, save_directory: Path) -> None:
        for name in sorted(NAMES):
            found = current(self.folder, name)
            if found.exists() and (name != CARD or self._is_edited(found)):  # the others have checksums
                shutil.copyfile(found, save_directory / name)
        for name, content in self.more.items():
            (save_directory / name).write_bytes(content)

    def _is_edited(self, card: Path) -> bool:
        """Whether the card that came with the bundle was changed; a link would publish another file."""
        return not card.is_symlink() and card.read_text(errors="replace") != model_card(read_folder(self.folder).config)

    def generate_model_card(self, *_args: object, **_kwargs: object) -> ModelCard:
        """The card of the bundle in its place on the hub."""
        config = read_folder(self.folder).config
        return ModelCard(model_card(config, self.card, repo_id=self.repo_id, has_page=bool(self.more)))
