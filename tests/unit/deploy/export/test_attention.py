"""Attention of any shape is exported, and computes the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from basisprune.deploy.export.onnx import open_session, over_two_axes, to_proto


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from([None, 2, "all"]), st.booleans())
def test_leading_axes_are_only_a_way_of_counting(leading, masked, scaled):
    query, value = torch.randn(*leading, 4, 6), torch.randn(*leading, 5, 3)
    key = torch.randn(*leading, 5, 6)
    shape = (4, 5) if masked == 2 else (*leading, 4, 5)
    mask = None if masked is None else torch.randn(shape)
    options = {"scale": 0.3} if scaled else {}
    wanted = F.scaled_dot_product_attention(query, key, value, mask, **options)
    torch.testing.assert_close(over_two_axes(query, key, value, mask, **options), wanted)


class _Attention(nn.Module):
    """Attention within windows of the image: (batch, windows, heads, length, width) unless there are fewer axes."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes, self.mix = axes, nn.Conv2d(3, 24, 1)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.mix(images).flatten(2).transpose(1, 2)  # (batch, 16, 24)
        if self.axes == 3:
            query, key, value = rows.chunk(3, -1)
        else:
            windows = rows.unflatten(1, (4, 4)).unflatten(3, (3, 2, 4))
            query, key, value = windows.permute(3, 0, 1, 4, 2, 5).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0)
        return mixed.flatten(1)


@pytest.mark.parametrize("axes", [3, 5])
def test_attention_with_other_than_four_axes_is_exported(axes):
    torch.manual_seed(0)
    network = _Attention(axes).eval()
    session = open_session(to_proto(network, torch.randn(2, 3, 4, 4)).SerializeToString())
    for count in (1, 3):
        images = torch.randn(count, 3, 4, 4)
        (found,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), network(images), rtol=1e-5, atol=1e-6)
