"""Laws of tracing: a graph does what the code does, or refuses the input."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.deploy.allowed import OtherSizeError
from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.errors import BundleError, LayerError
from basisprune.torchkit.running import tensors_in


class Code(nn.Module):
    """A conv, and some code behind it."""

    def __init__(self, does: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.conv, self.does = nn.Conv2d(3, 4, 3, padding=1), does

    def forward(self, x: Tensor) -> object:
        return self.does(self.conv(x))


def written(does: Callable[[Tensor], object], folder) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Code(does).eval().requires_grad_(False)
    return model, from_pretrained(save_pretrained(model, folder / "b", input_shape=(3, 8, 8)))


def padded(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    return F.pad(x, (0, -width % 3, 0, math.ceil(height / 3) * 3 - height))


def gridded(x: Tensor) -> Tensor:
    rows, columns = torch.meshgrid(*(torch.arange(end=side, device=x.device) for side in x.shape[2:]), indexing="ij")
    return x + rows.to(x.dtype) * torch.ones(x.shape[2:]) - columns.float()


def shifted(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2, 1:] = x[:, 2:, :-1]
    return y


@pytest.mark.parametrize(
    "does",
    [
        padded,
        gridded,
        shifted,
        lambda x: sum(part * (place + 1) for place, part in enumerate(x.unbind(1))),
        lambda x: x.view(*x.shape[:2], -1).transpose(1, 2).unflatten(1, list(x.shape[2:])),
        lambda x: F.interpolate(x, [side * 2 for side in x.shape[2:]]) if x.shape[2] < 1000 else x,
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)).masked_fill(x > 0.5, 0.5),
        lambda x: x * torch.as_tensor(x),
        lambda x: {2: torch.relu, 4: torch.tanh}[x.dim()](x),
    ],
    ids=["padded", "gridded", "shifted", "unbound", "viewed", "decided", "masked", "as_tensor", "looked up"],
)
def test_code_about_sizes_is_written_with_them(tmp_path, does):
    model, loaded = written(does, tmp_path)
    for shape in ((2, 3, 8, 8), (5, 3, 8, 8), (1, 3, 20, 14)):
        x = torch.randn(shape)
        assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x * 2 if x.shape[-1] > 10 else x,
        lambda x: x * float(x.shape[-1]),
        lambda x: sum(x[..., place] for place in range(x.shape[-1])),
        lambda x: x * {8: 1.0, 40: 2.0}[x.shape[-1]],
        lambda x: torch.stack([row * 2 for row in x.unbind(3)]).sum(0),
    ],
    ids=["compared", "converted", "counted", "looked up", "gone through"],
)
def test_a_graph_refuses_inputs_for_which_the_code_would_do_something_else(tmp_path, does):
    model, loaded = written(does, tmp_path)
    for count in (1, 4):
        x = torch.randn(count, 3, 8, 8)
        assert torch.equal(loaded(x), model(x))
    with pytest.raises(OtherSizeError, match="inputs of another size"):
        loaded(torch.randn(1, 3, 40, 40))


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x * 2 if x.shape[0] == 1 else x,
        lambda x: torch.stack([row * 2 for row in x]),
        lambda x: x * len(x),
        lambda x: x * 2 if x.mean() > 0 else x,
        lambda x: x * int(x.max()),
        lambda x: x * torch.empty_like(x).fill_(2),
    ],
    ids=["batch compared", "batch gone through", "batch counted", "by values", "of values", "unknown operation"],
)
def test_what_depends_on_the_batch_or_on_values_is_no_graph(tmp_path, does):
    with pytest.raises((BundleError, LayerError), match="factory="):
        written(does, tmp_path)
    assert not list(tmp_path.iterdir())


def test_outputs_by_name_are_attributes_too(tmp_path):
    model, loaded = written(lambda x: {"logits": x * 2, "aux": [x]}, tmp_path)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded(x).logits, model(x)["logits"])
    assert torch.equal(loaded(x)["aux"][0], model(x)["aux"][0])
    assert len(list(tensors_in(loaded(x)))) == 2
    assert not hasattr(loaded(x), "scores")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def test_weights_that_torch_computes_are_written_as_they_are(tmp_path):
    model, x = Normed().eval().requires_grad_(False), torch.randn(2, 3, 8, 8)
    loaded = from_pretrained(save_pretrained(model, tmp_path / "b", input_shape=(3, 8, 8)))
    assert torch.equal(loaded(x), model(x))
    assert "parametrizations" in dict(model.named_modules())["conv"]._modules
