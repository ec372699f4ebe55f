"""Laws of repeating a run from its folder."""

from __future__ import annotations

import pytest

from basisprune.callback import NullCallback
from basisprune.errors import ConfigError
from basisprune.runs.compress import certify_run
from basisprune.runs.folder import OutputFolder


@pytest.mark.parametrize(
    "named", [{"data": "hf:owner/data"}, {"model": "hf-hub:owner/net"}, {"unlabelled": "hf:owner/more"}], ids=str
)
def test_what_the_settings_of_a_run_would_fetch_from_anybody_is_not_fetched(named, tmp_path, monkeypatch):
    settings = {"model": "resnet18", "data": str(tmp_path), "unlabelled": str(tmp_path), "max_drop": 0.01, **named}
    OutputFolder(tmp_path / "run").claim(settings, NullCallback())
    asked: list[object] = []
    monkeypatch.setattr("basisprune.runs.compress.compress", lambda *given, **_more: asked.append(given))
    with pytest.raises(ConfigError, match=r"would be fetched.*--trust-code"):
        certify_run(tmp_path / "run", tmp_path / "labels.csv")
    assert asked == []
    certify_run(tmp_path / "run", tmp_path / "labels.csv", trust_code=True)
    assert len(asked) == 1
