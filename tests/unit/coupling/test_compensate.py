"""Laws of handing over: what is constant or follows from what stays is not lost."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS
from torch import Tensor, nn

from basisprune.basis.decompose import decompose
from basisprune.coupling import cut, hand_over, trace_coupling, unit_inputs
from basisprune.coupling.cutting import dropped
from basisprune.errors import PlanError
from basisprune.importance import filter_statistics
from basisprune.torchkit import moments
from basisprune.torchkit.moments import OutputStatistics


def handed(model: nn.Module, keep: dict[str, tuple[int, ...]], x: Tensor, *, refit: bool) -> nn.Module:
    """The model cut to the units that stay, after the others have handed over."""
    coupling = trace_coupling(model, x)
    statistics = filter_statistics(model, coupling, [x])
    copied = copy.deepcopy(model)
    return cut(copied, hand_over(copied, coupling, keep, statistics, refit=refit), keep)


def chain(kind: str, *, bias: bool = True, groups: int = 1) -> tuple[nn.Module, Tensor]:
    """A first layer that makes 6 channels for each group, and a second that reads them without padding."""
    torch.manual_seed(0)
    makes, reads = 6 * groups, 4 * groups
    dims = {"conv1d": 1, "conv2d": 2, "conv3d": 3, "transposed": 2}.get(kind, 2)
    convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    x = torch.randn(16, 3, *[7] * dims, dtype=torch.float64)
    first = convs[dims - 1](3, makes, 2)
    if kind == "linear":
        end: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(makes, reads, bias=bias)]
    elif kind == "transposed":  # of which all outputs see the whole kernel
        end = [nn.ConvTranspose2d(makes, reads, 2, stride=2, groups=groups, bias=bias)]
        with torch.no_grad():  # and all its places alike
            end[0].weight.copy_(end[0].weight.mean((2, 3), keepdim=True).expand_as(end[0].weight))
    else:
        end = [convs[dims - 1](makes, reads, 3, groups=groups, bias=bias)]
    end[-1] = end[-1].double()
    tail = [nn.ReLU(), *([] if kind == "linear" else [nn.Flatten()]), nn.LazyLinear(2)]
    model = nn.Sequential(first, nn.ReLU6(), *end, *tail).double().eval()
    model(x)
    return model, x


KINDS = ["conv1d", "conv2d", "conv3d", "transposed", "linear"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_constant_channels_go_without_a_trace(kind, split, refit, bias):
    model, x = chain(kind, bias=bias)
    with torch.no_grad():  # one channel is dead, one sits at the ceiling of its activation
        model[0].weight[[1, 4]] = 0
        model[0].bias[1], model[0].bias[4] = -1.0, 9.0
    if split:
        model = decompose(model, scale_init=1.0, linear=True)
        (name,) = [group.name for group in trace_coupling(model, x).groups if group.layers[0].startswith("0")]
    else:
        name = "0"
    small = handed(model, {name: (0, 2, 3, 5)}, x, refit=refit)
    torch.testing.assert_close(small(x), model(x), rtol=1e-9, atol=1e-9)
    other = torch.rand_like(x)  # on images that were never seen
    torch.testing.assert_close(small(other), model(other), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "conv3d", "linear"])
def test_a_channel_that_follows_from_others_goes_without_a_trace(kind, groups, monkeypatch):
    monkeypatch.setattr(moments, "shrunk", lambda covariance, _count: covariance)
    if kind == "linear" and groups == 2:
        return
    model, x = chain(kind, groups=groups)
    model[1] = nn.Identity()
    with torch.no_grad():  # in every group two channels are mixtures of three others, and one is one of them
        for start in range(0, 6 * groups, 6):
            mixing = torch.randn(2, 3, dtype=torch.float64)
            model[0].weight[start + 3 : start + 5] = torch.einsum(
                "pk,k...->p...", mixing, model[0].weight[start : start + 3]
            )
            model[0].bias[start + 3 : start + 5] += 1.0
            model[0].weight[start + 5] = model[0].weight[start]
    keep = (0, 1, 2)
    small = handed(model, {"0": keep}, x, refit=True)
    plain = cut(model, trace_coupling(model, x), {"0": keep})
    lost = (plain(x) - model(x)).norm()
    # The ridge of the least squares keeps a thousandth.
    assert (small(x) - model(x)).norm() < 0.01 * lost


def test_with_few_images_what_is_handed_over_holds_on_others_too(monkeypatch):
    """Without shrinkage, as many channels as images explain all others, on these images alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10)).double().eval()
    seen, new = (torch.randn(count, 8, dtype=torch.float64) for count in (40, 2000))
    keep = {"0": tuple(range(36))}
    errors = []
    for shrinks in (True, False):
        if not shrinks:
            monkeypatch.setattr(moments, "shrunk", lambda covariance, _count: covariance)
        small = handed(model, keep, seen, refit=True)
        errors.append([(small(x) - model(x)).square().mean().item() for x in (seen, new)])
    (_, shrunk), (fitted, plain) = errors
    assert fitted < 0.05 * plain
    assert shrunk < 0.5 * plain


def test_without_a_ridge_it_is_exact(monkeypatch):
    from basisprune.basis import refit
    from basisprune.coupling import compensate

    model, x = chain("conv2d")
    model[1] = nn.Identity()
    with torch.no_grad():
        model[0].weight[3:] = torch.einsum("pk,k...->p...", torch.randn(3, 3).double(), model[0].weight[:3])
    monkeypatch.setattr(moments, "shrunk", lambda covariance, _count: covariance)
    exact = lambda *given, faint: refit.least_squares(*given, ridge=0.0, faint=faint)  # noqa: E731
    monkeypatch.setattr(compensate, "least_squares", exact)
    small = handed(model, {"0": (0, 1, 2)}, x, refit=True)
    torch.testing.assert_close(small(x), model(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
def test_what_each_layer_puts_out_comes_nearer_to_what_it_did(network, split):
    model, x = NETWORKS[network]()
    model = decompose(model, scale_init=1.0) if split else model
    coupling = trace_coupling(model, x)
    keep = {group.name: _all_but_one(group) for group in coupling.groups}
    before = copy.deepcopy(model.state_dict())
    small = {how: handed(model, keep, x, refit=how == "refit") for how in ("mean", "refit")}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(one(x).isfinite().all() and one(x).shape == model(x).shape for one in small.values())
    statistics = filter_statistics(model, coupling, [x])
    groups = {group.name: group for group in coupling.groups}
    for name, parts in unit_inputs(model, coupling).items():
        layer, seen = model.get_submodule(name), inputs_of(model, name, x)
        if layer.weight[0, 0].numel() > 1 or name.endswith("basis"):
            continue  # a law of 1x1 convs and linear layers alone: others mix positions
        gone = [int(place) for group, index in parts.items() for place in index[dropped(groups[group], keep)].ravel()]
        cut_off = seen.clone()
        cut_off[:, gone] = 0
        errors = [(layer(cut_off) - layer(seen)).square().sum()]
        for refit in (False, True):
            other = copy.deepcopy(model)
            hand_over(other, coupling, keep, statistics, refit=refit)
            errors.append((other.get_submodule(name)(cut_off) - layer(seen)).square().sum())
        assert errors[2] <= errors[1] * (1 + 1e-9) + 1e-15
        assert errors[1] <= errors[0] * (1 + 1e-9) + 1e-15


def inputs_of(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """All that one layer reads, as rows (positions, channels, 1, ...)."""
    caught: list[Tensor] = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_pre_hook(lambda _layer, args: caught.append(args[0].detach()))
    model(x)
    handle.remove()
    axis = -1 if isinstance(layer, nn.Linear) else 1
    rows = torch.cat([one.movedim(axis, -1).flatten(0, -2) for one in caught])
    return rows.reshape(*rows.shape, *[1] * (layer.weight.dim() - 2))


def _all_but_one(group) -> tuple[int, ...]:
    gone = {part[-1] for part in group.parts}
    return tuple(unit for unit in range(group.size) if unit not in gone)


def test_a_new_bias_is_cut_with_its_filters():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 5, 1, bias=False), nn.ReLU(), nn.Conv2d(5, 2, 1, bias=False)
    ).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    small = handed(model, {"0": (0, 1, 3), "2": (1, 4)}, x, refit=False)
    assert [small[place].bias.numel() for place in (0, 2, 4)] == [3, 2, 2]
    assert model[2].bias is None
    mean = model[:2](x).mean((0, 2, 3))
    lost = model[2].weight.flatten(1)[:, [2, 4, 5]] @ mean[[2, 4, 5]]
    torch.testing.assert_close(small[2].bias, lost[[1, 4]])


def test_a_wide_input_hands_over_its_means_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 20, 1), nn.ReLU(), nn.Flatten(), nn.Linear(20 * 256, 2)).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    keep = {"0": tuple(range(15))}
    both = [handed(model, keep, x, refit=refit)(x) for refit in (True, False)]
    assert torch.equal(*both)
    # Each position has its own mean, so the mean over images is exact.
    torch.testing.assert_close(both[0].mean(0), model(x).mean(0))


def test_statistics_of_another_network_are_refused_by_name():
    model, x = chain("conv2d")
    coupling = trace_coupling(model, x)
    wrong = {"2": OutputStatistics(torch.zeros(5).double(), torch.zeros(1, 5, 5).double())}
    with pytest.raises(PlanError, match=r"^2: means of 5 channels given, it reads 6"):
        hand_over(model, coupling, {"0": (0, 1)}, wrong, refit=True)


def test_layers_with_weights_of_their_own_making_are_left_as_they_are():
    model, x = chain("conv2d")
    model[2] = nn.utils.parametrizations.weight_norm(model[2])
    coupling = trace_coupling(model, x)
    statistics = filter_statistics(model, coupling, [x])
    before = copy.deepcopy(model.state_dict())
    assert hand_over(model, coupling, {group.name: (0, 1) for group in coupling.groups}, statistics, refit=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if not key.startswith("5"))
