"""Laws of bundles on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from bundles import refused, same
from huggingface_hub import ModelCard
from tiny import tiny_decomposed, tiny_model

from basisprune.deploy.bundle import Card, from_pretrained, push_to_hub, save_pretrained
from basisprune.errors import BundleError, ConfigError
from basisprune.transfer.model import transfer_model


def test_a_bundle_comes_from_the_hub_by_its_id(saved, monkeypatch, tmp_path):
    asked = []

    def download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision))
        return str(saved)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("basisprune.deploy.bundle.loading.snapshot_download", download)
    assert same(from_pretrained("owner/name", revision="v1"), tiny_decomposed(), torch.randn(2, 3, 16, 16))
    assert asked == [("owner/name", "v1")]

    def fail(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr("basisprune.deploy.bundle.loading.snapshot_download", fail)
    with pytest.raises(BundleError, match=r"owner/name: no such folder, and the hub .*offline"):
        from_pretrained("owner/name")


def test_a_factory_that_a_bundle_from_the_hub_names_is_called_only_if_it_is_trusted(tmp_path, monkeypatch):
    folder = save_pretrained(transfer_model("networks:Residual", 3, input_size=16), tmp_path / "b")
    monkeypatch.setattr("basisprune.deploy.bundle.loading.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(BundleError, match=r"built by 'networks:Residual'.*trust_remote_code=True"):
        from_pretrained("owner/name")
    from_pretrained("owner/name", factory="networks:Residual")
    from_pretrained("owner/name", trust_remote_code=True)


BUNDLE = {"config.json", "model.safetensors", "plans.json", "README.md"}


class Commit:
    commit_url, repo_id = "hub/owner/name/commit/1", "owner/name"


class Hub:
    calls: ClassVar[list[tuple]] = []

    def __init__(self, token=None):
        Hub.calls = []

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))
        return Commit()

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        files = {path.name: path.read_text(errors="ignore") for path in Path(folder_path).iterdir()}
        self.calls.append(("upload", repo_id, files))
        return Commit()


def test_a_network_or_a_folder_is_pushed_with_a_card_made_from_its_metrics(saved, monkeypatch, tmp_path):
    monkeypatch.setattr("basisprune.deploy.bundle.hub.HfApi", Hub)
    assert push_to_hub(saved, "owner/name") == Commit.commit_url
    assert Hub.calls[0] == ("create", "owner/name", False, True)
    files = Hub.calls[1][2]
    assert files.keys() == {*BUNDLE, "app.py", "requirements.txt", "model.onnx"}
    assert "| accuracy | 0.9 |" in files["README.md"]
    assert "red, green, blue" in files["README.md"]
    assert ModelCard(files["README.md"]).data.library_name == "basisprune"

    (saved / "README.md").unlink()
    push_to_hub(saved, "owner/name", card=Card(page=False))
    assert Hub.calls[1][2].keys() == BUNDLE
    assert "| accuracy | 0.9 |" in Hub.calls[1][2]["README.md"]
    assert not (saved / "README.md").exists()
    (saved / "README.md").write_text("my own words")
    push_to_hub(saved, "owner/name", card=Card(page=False))
    assert Hub.calls[1][2]["README.md"] == "my own words"
    (tmp_path / "secret").write_text("my key")
    (saved / "README.md").unlink()
    (saved / "README.md").symlink_to(tmp_path / "secret")
    push_to_hub(saved, "owner/name", card=Card(page=False))
    assert "my key" not in Hub.calls[1][2]["README.md"]
    (saved / "README.md").unlink()

    push_to_hub(tiny_model(), "owner/name", private=True, metrics={"test": {"accuracy": 0.7}}, card=Card(page=False))
    assert Hub.calls[0] == ("create", "owner/name", True, True)
    assert "| test.accuracy | 0.7 |" in Hub.calls[1][2]["README.md"]


def test_a_push_that_cannot_work_is_refused_before_the_hub_is_asked(saved, monkeypatch):
    monkeypatch.setattr("basisprune.deploy.bundle.hub.HfApi", None)
    with pytest.raises(ConfigError, match="write 'owner/name'"):
        push_to_hub(saved, "name")
    with pytest.raises(ConfigError, match="are for a network"):
        push_to_hub(saved, "owner/name", metrics={})
    (saved / "plans.json").unlink()
    with pytest.raises(BundleError, match=r"plans\.json"):
        push_to_hub(saved, "owner/name")


def test_a_missing_folder_is_refused(tmp_path):
    refused(tmp_path / "nothing", "no such folder")
