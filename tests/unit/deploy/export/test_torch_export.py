"""Laws of programs of torch.export."""

from __future__ import annotations

import torch
from graphs import close
from tiny import tiny_decomposed

from basisprune.deploy.export import export_program


def test_a_program_of_torch_export_computes_the_same_for_any_batch_size(tmp_path):
    model = tiny_decomposed()
    loaded = torch.export.load(export_program(model, tmp_path / "m.pt2")).module()
    for count in (1, 2, 5):
        x = torch.randn(count, 3, 16, 16)
        with torch.no_grad():
            assert close(model(x), loaded(x))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]
