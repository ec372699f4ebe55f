"""Convs as matrix products: the same numbers and gradients, only where they are meant for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.torchkit.small_maps import _along_axis, as_matrix_products, transform_pixels

small = st.integers(1, 4)


def frozen(*args, **kwargs) -> nn.Conv2d:
    return nn.Conv2d(*args, bias=False, **kwargs).requires_grad_(False)


def assert_same(conv: nn.Conv2d, features: torch.Tensor, found: torch.Tensor) -> None:
    expected = conv(features)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, features, direction)[0] for output in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    size=st.tuples(small, small),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(small, small),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    channels_last=st.booleans(),
)
def test_few_places_are_what_the_conv_computes(size, kernel, stride, padding, channels_last):
    conv = frozen(128, 129, kernel, stride, padding).double()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    features = torch.randn(2, 128, *size, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    found = as_matrix_products(conv, features)
    high, wide = (len(list(_along_axis(*axis))) for axis in zip(size, kernel, stride, padding, strict=True))
    if kernel != (1, 1):
        assert (found is not None) == (0 < high * wide <= 4)
    if found is not None:
        assert_same(conv, features, found)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_conv_of_one_pixel_with_a_large_weight(stride):
    conv = frozen(64, 96, 1, stride).double()
    features = torch.randn(2, 64, 5, 4, dtype=torch.float64, requires_grad=True)
    found = as_matrix_products(conv, features)
    assert found is not None
    assert_same(conv, features, found)


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (frozen(128, 128, 3, padding=1), 3),  # nine places
        (frozen(64, 64, 3, padding=1), 2),  # a small weight
        (frozen(128, 128, 5), 2),  # no output at all, which the conv itself refuses
        (frozen(128, 128, 3, padding=1, groups=2), 2),
        (frozen(128, 128, 3, padding=2, dilation=2), 2),
        (frozen(128, 128, 3, padding=1, padding_mode="circular"), 2),
        (frozen(128, 128, 3, padding="same"), 2),
        (nn.Conv2d(128, 128, 3, padding=1, bias=False), 2),  # trained
        (nn.Conv2d(128, 128, 3, padding=1).requires_grad_(False), 2),  # with a bias
    ],
)
def test_other_convs_are_left_alone(conv, size):
    assert as_matrix_products(conv, torch.randn(2, conv.in_channels, size, size)) is None


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("kernel", "stride", "size"), [(3, 1, 2), (3, 2, 4), (1, 1, 2), (1, 2, 4)])
def test_a_pair_trains_on_a_tiny_map_as_it_evaluates(kernel, stride, size, layout):
    conv = nn.Conv2d(128, 130, kernel, stride, kernel // 2, bias=False).double()
    pair = decompose(conv, scale_init=0.7)
    features = torch.randn(3, 128, size, size, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    direction = torch.randn(3, 130, 2, 2, dtype=torch.float64)
    found = []
    for training in (True, False):
        output = pair.train(training)(features)
        found.append((output, *torch.autograd.grad(output, (features, pair.scaling.scale), direction)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9, check_stride=False)
    assert found[0][0].is_contiguous(memory_format=layout)
    pair.train()(features).relu_()  # what follows may work in place


def test_transformed_pixels_lie_as_the_features_do():
    matrix, bias = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    for shape in ((2, 4, 5), (2, 4, 3, 5), (2, 4, 2, 3, 2)):
        features = torch.randn(shape, dtype=torch.float64)
        for each in (features, features.movedim(1, -1).contiguous().movedim(-1, 1)):
            found = transform_pixels(each, matrix, bias)
            expected = torch.einsum("oc,nc...->no...", matrix, each) + bias.view(-1, *[1] * (each.dim() - 2))
            torch.testing.assert_close(found, expected)
            assert found.is_contiguous() == each.is_contiguous()


def test_a_conv_that_is_watched_is_called():
    conv, features = frozen(128, 128, 3, padding=1), torch.randn(2, 128, 2, 2)
    calls = []
    handle = conv.register_forward_hook(lambda *_: calls.append(1))
    assert as_matrix_products(conv, features) is None
    handle.remove()
    assert as_matrix_products(conv, features) is not None


def test_an_empty_batch_and_wrong_channels_are_left_to_the_conv():
    conv = frozen(128, 128, 3, padding=1)
    assert as_matrix_products(conv, torch.randn(0, 128, 2, 2)) is None
    assert as_matrix_products(conv, torch.randn(2, 64, 2, 2)) is None


def test_lower_precision_is_left_to_the_conv():
    features = torch.randn(2, 128, 2, 2)
    conv = frozen(128, 128, 3, padding=1)
    assert as_matrix_products(conv, features) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert as_matrix_products(conv, features) is None
    assert as_matrix_products(conv.bfloat16(), features.bfloat16()) is None


def test_gradients_of_few_places_can_be_differentiated_again_and_transforms_go_past_them():
    pair = decompose(nn.Conv2d(128, 128, 3, padding=1, bias=False), scale_init=1.0).double().train()
    features = torch.randn(1, 128, 2, 2, dtype=torch.float64, requires_grad=True)
    assert as_matrix_products(pair.basis, features) is not None

    def norm_of_gradient(run) -> torch.Tensor:
        (first,) = torch.autograd.grad(run(features).pow(3).sum(), features, create_graph=True)
        return torch.autograd.grad(first.square().sum(), features)[0]

    plain = norm_of_gradient(lambda x: nn.functional.conv2d(x, pair.weight, padding=1))
    torch.testing.assert_close(norm_of_gradient(pair), plain)
    batches = features.detach()[None].repeat(2, 1, 1, 1, 1)
    torch.testing.assert_close(torch.func.vmap(pair)(batches)[0], pair(features))
