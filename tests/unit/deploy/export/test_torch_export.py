"""Laws of programs of torch.export."""

from __future__ import annotations

import pytest
import torch
from graphs import close
from tiny import tiny_decomposed
from torch import nn

from basisprune.deploy.export import export_program
from basisprune.errors import ModelError


def test_a_program_of_torch_export_computes_the_same_for_any_batch_size(tmp_path):
    model = tiny_decomposed()
    loaded = torch.export.load(export_program(model, tmp_path / "m.pt2")).module()
    for count in (1, 2, 5):
        x = torch.randn(count, 3, 16, 16)
        with torch.no_grad():
            assert close(model(x), loaded(x))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("_guards_fn", nn.Parameter(torch.ones(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._guards_fn


def test_a_parameter_with_a_name_of_torch_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ModelError, match="Odd cannot be exported"):
        export_program(Odd(), tmp_path / "m.pt2", example_inputs=torch.ones(2, 3, 4, 4))
    assert list(tmp_path.iterdir()) == []
