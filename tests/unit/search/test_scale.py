"""What networks weigh."""

from __future__ import annotations

from types import SimpleNamespace

from tiny import Notes
from torch import nn

from basisprune.method.states import StageStore, State
from basisprune.recipes import DECOMPOSED, DENSE
from basisprune.search.candidates import Scale


def test_a_network_that_cannot_be_exported_is_timed_in_pytorch(monkeypatch):
    def onnx_session(model, shape, threads):
        raise RuntimeError("no such operator")

    def measure_latency(models, shape, *, batch_sizes, backends):
        assert backends == ("eager",)
        return SimpleNamespace(rows=[SimpleNamespace(seconds=0.25)])

    monkeypatch.setattr("basisprune.search.candidates.measure_latency", measure_latency)
    monkeypatch.setattr("basisprune.search.candidates.onnx_session", onnx_session)
    monkeypatch.setattr("basisprune.search.candidates.has_onnx", lambda: True)
    notes = Notes()
    spec = SimpleNamespace(shape=(3, 8, 8))
    pipeline = SimpleNamespace(spec=spec, notify=notes, planner=None, store=StageStore(None))
    scale = Scale(pipeline, timed=True)
    for steps in ((DENSE,), (DECOMPOSED,)):
        assert scale.milliseconds(State(steps, nn.Identity()), nn.Identity()) == 250
    assert scale.timed_in == "eager"
    assert len(notes.lines) == 1
    assert "no such operator" in notes.lines[0]
