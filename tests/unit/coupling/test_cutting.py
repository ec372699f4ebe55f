"""Laws of where units lie: cutting a unit's channels cuts what is listed as read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS, randomise_norms
from torch import Tensor, nn
from zeroing import without_channels

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import Shift, basis_pairs
from basisprune.coupling import cut, hand_over, trace_coupling, unit_inputs, unit_outputs
from basisprune.coupling.cutting import drop_blocks, dropped, find_blocks
from basisprune.errors import PlanError
from basisprune.importance import filter_statistics
from basisprune.torchkit import moments
from basisprune.torchkit.moments import OutputStatistics
from basisprune.torchkit.surgery import TORCH_CONVS, is_depthwise
from basisprune.types import Block, Coupling


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_what_a_layer_reads_of_a_unit_is_what_the_unit_makes(network, split):
    """With a unit's filters at zero, the channels listed are constant where layers read them, and no others change."""
    model, x = NETWORKS[network]()
    model = decompose(model, scale_init=1.0) if split else model
    coupling = trace_coupling(model, x)
    readers = unit_inputs(model, coupling)
    assert readers

    def reads() -> dict[str, torch.Tensor]:
        found = {}
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda layer, args, name=name: found.__setitem__(
                    name, args[0].movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1)
                )
            )
            for name in readers
        ]
        with torch.no_grad():
            model(x)
        for handle in handles:
            handle.remove()
        return found

    before = reads()
    for group in coupling.groups:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for name in group.layers:  # the last unit outputs nothing but what norms add
            layer = model.get_submodule(name)
            outputs = torch.from_numpy(unit_outputs(model, group, name)[-1])
            weight = layer.weight.data
            if getattr(layer, "transposed", False):
                weight.view(layer.groups, -1, *weight.shape[1:])[:, :, outputs % weight.shape[1]] = 0
            else:
                weight[outputs] = 0
            if layer.bias is not None:
                layer.bias.data[outputs] = 0
        after = reads()
        for name, parts in readers.items():
            listed = parts[group.name][-1] if group.name in parts else np.array([], dtype=int)
            pooled = before[name].shape[1] == len(x)
            for channel in listed:
                assert pooled or after[name][channel].std() < 1e-12
            if parts.keys() == {group.name} and group.layers[0].startswith(min(readers)):
                others = [place for place in range(len(before[name])) if place not in listed]
                assert others or group.size == 1
        model.load_state_dict(saved)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_unit_has_equally_many_channels_and_none_twice(network):
    model, x = NETWORKS[network]()
    coupling = trace_coupling(model, x)
    for name, parts in unit_inputs(model, coupling).items():
        layer = model.get_submodule(name)
        read = np.concatenate([index.ravel() for index in parts.values()])
        assert len(set(read.tolist())) == len(read)
        width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        assert read.max() < width
        assert not (isinstance(layer, TORCH_CONVS) and is_depthwise(layer))


def test_a_flattened_map_is_read_at_every_position():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    found = unit_inputs(net, trace_coupling(net, torch.zeros(1, 3, 8, 8)))
    assert found["2"]["0"].tolist() == [list(range(36 * unit, 36 * (unit + 1))) for unit in range(4)]


def test_a_layer_whose_filters_cannot_be_told_apart_is_refused_by_name():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    group = trace_coupling(net, torch.zeros(1, 3, 8, 8))["0"]
    with pytest.raises(PlanError, match=r"^2: its filters cannot be distinguished"):
        unit_outputs(net, group, "2")


def test_a_coupling_of_another_network_is_refused():
    small, large = (nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 2, 1)) for width in (4, 8))
    coupling = trace_coupling(large, torch.zeros(1, 3, 8, 8))
    for other in (small, nn.Sequential(large[0]), decompose(large)):
        with pytest.raises(PlanError, match="the coupling is that of another network; call trace_coupling on this one"):
            unit_inputs(other, coupling)


REAL = [
    "resnet18", "densenet121", "vgg11_bn", "mobilenetv2_100", "mobilenetv3_small_100", "regnety_002", "seresnet18",
    "skresnet18", "mixnet_s", "shufflenet_v2_x0_5",
]  # fmt: skip


def random_keep(coupling: Coupling, seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Some units of each group, other ones in each part, a different share for each group."""
    generator = torch.Generator().manual_seed(seed)
    keep = {}
    for group in coupling.groups:
        length = len(group.parts[0])
        left = int(torch.randint(1, length, (), generator=generator))
        kept = [part[i] for part in group.parts for i in torch.randperm(length, generator=generator)[:left].tolist()]
        keep[group.name] = tuple(sorted(kept))
    return keep


def real(name: str) -> tuple[nn.Module, Tensor]:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        slim = {"mlp_ratio": 0.01} if name.startswith("vgg") else {}
        library = torchvision.models.get_model if name.startswith("shuffle") else timm.create_model
        model = library(name, num_classes=5, **slim)
        randomise_norms(model)
        return model.double().eval(), torch.randn(2, 3, 64, 64, dtype=torch.float64)


def build(name: str) -> tuple[nn.Module, Tensor]:
    return NETWORKS[name]() if name in NETWORKS else real(name)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).detach())


@pytest.mark.parametrize("name", [*NETWORKS, *REAL])
def test_a_cut_network_computes_what_the_original_computes_without_the_channels(name: str) -> None:
    model, images = build(name)
    coupling = trace_coupling(model, images)
    keep = random_keep(coupling)
    smaller = cut(model, coupling, keep)
    with torch.no_grad():
        expected = without_channels(model, coupling, keep)(images)
        assert relative_error(smaller(images), expected) < 1e-9
    assert coupling.groups
    assert not coupling.unknown_ops
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_decomposed_networks_are_cut_like_others(name: str) -> None:
    model, images = NETWORKS[name]()
    model = decompose(model)
    coupling = trace_coupling(model, images)
    keep = random_keep(coupling)
    with torch.no_grad():
        expected = without_channels(model, coupling, keep)(images)
        assert relative_error(cut(model, coupling, keep)(images), expected) < 1e-9
    assert coupling.groups
    assert all(not layer.endswith(".basis") for group in coupling.groups for layer in group.layers)


@given(
    groups=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=3),
    norm=st.sampled_from([None, 1, 2, 3, 6]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_grouped_convs_stay_grouped_and_compute_the_same(groups: list[int], norm: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, 12, 1)]
    for group in groups:
        layers += [nn.Conv2d(12, 12, 3, padding=1, groups=group), nn.ReLU()]
    if norm:
        layers += [nn.GroupNorm(norm, 12)]
    model = nn.Sequential(*layers, nn.Conv2d(12, 2, 1)).double()
    images = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    coupling = trace_coupling(model, images)
    keep = random_keep(coupling, seed)
    smaller = cut(model, coupling, keep)
    for before, after in zip(model.modules(), smaller.modules(), strict=True):
        if isinstance(before, nn.Conv2d) and isinstance(after, nn.Conv2d):
            depthwise = before.groups == 12
            assert after.groups == (after.in_channels if depthwise else before.groups)
    found = smaller(images)
    if norm is None:
        assert relative_error(found, without_channels(model, coupling, keep)(images)) < 1e-9
    assert found.shape == (2, 2, 5, 5)


def test_a_hand_counted_network_has_the_predicted_parameters() -> None:
    model, images = NETWORKS["plain"]()
    coupling = trace_coupling(model, images)
    assert [(group.name, group.size) for group in coupling.groups] == [("0", 8), ("3", 12), ("6", 6)]
    smaller = cut(model, coupling, {"0": (0, 3, 7), "3": (1, 2, 4, 5), "6": (0, 5)})
    convs = (3 * 9 * 3 + 3) + (3 * 9 * 4 + 4) + (4 * 2 + 2)
    norms = 2 * (3 + 4 + 2)
    assert sum(p.numel() for p in smaller.parameters()) == convs + norms + (2 * 4 + 4)
    assert [b.numel() for b in smaller.buffers()] == [3, 3, 1, 4, 4, 1, 2, 2, 1]


def test_what_is_kept_is_what_was_there() -> None:
    model, images = NETWORKS["plain"]()
    smaller = cut(model, trace_coupling(model, images), {"0": (1, 4)})
    assert torch.equal(smaller[0].weight, model[0].weight[[1, 4]])
    assert torch.equal(smaller[1].running_var, model[1].running_var[[1, 4]])
    assert torch.equal(smaller[3].weight, model[3].weight[:, [1, 4]])
    assert (smaller[0].out_channels, smaller[1].num_features, smaller[3].in_channels) == (2, 2, 2)


@pytest.mark.parametrize("name", NETWORKS)
def test_tracing_and_cutting_leave_the_network_as_it_was(name: str) -> None:
    model, images = NETWORKS[name]()
    model.train()
    before = copy.deepcopy(model)
    given_images, random_state = images.clone(), torch.get_rng_state()
    coupling = trace_coupling(model, images)
    smaller = cut(model, coupling, random_keep(coupling))
    assert torch.equal(images, given_images)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert repr(model) == repr(before)
    assert all(module.training for module in (*model.modules(), *smaller.modules()))
    assert all(torch.equal(a, b) for a, b in zip(*map(state, (model, before)), strict=True))
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in smaller.parameters()}
    assert not shared


def state(model: nn.Module) -> Iterator[Tensor]:
    yield from model.state_dict().values()


@pytest.mark.parametrize("name", NETWORKS)
def test_keeping_everything_changes_nothing(name: str) -> None:
    model, images = NETWORKS[name]()
    coupling = trace_coupling(model, images)
    same = cut(model, coupling, {group.name: tuple(range(group.size)) for group in coupling.groups})
    assert repr(same) == repr(model)
    assert torch.equal(same(images), model(images))


def test_in_place_cuts_the_network_itself() -> None:
    model, images = NETWORKS["residual"]()
    coupling = trace_coupling(model, images)
    keep = random_keep(coupling)
    expected = cut(model, coupling, keep)(images)
    parameters = list(model.parameters())
    assert cut(model, coupling, keep, inplace=True) is model
    assert torch.equal(model(images), expected)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_what_was_frozen_for_training_stays_so() -> None:
    model, images = NETWORKS["plain"]()
    model[0].requires_grad_(False)
    coupling = trace_coupling(model, images)
    smaller = cut(model, coupling, random_keep(coupling))
    assert [p.requires_grad for p in smaller.parameters()] == [p.requires_grad for p in model.parameters()]
    smaller.train()(images).square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in smaller.parameters())


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"nowhere": (0,)}, "nowhere: no such group"),
        ({"0": ()}, "not empty"),
        ({"0": (2, 1)}, "sorted"),
        ({"0": (0, 99)}, "0 to"),
        ({"3": (0, 1, 2)}, "parts must keep equally many"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(keep: dict[str, tuple[int, ...]], message: str) -> None:
    model, images = NETWORKS["grouped"]()
    with pytest.raises(PlanError, match=message):
        cut(model, trace_coupling(model, images), keep)


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_groups_of_a_norm_of_one_channel_each_go_as_a_whole(groups):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(groups, 8), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    coupling = trace_coupling(model, torch.randn(2, 3, 8, 8))
    keep = {"0": (0, 1, 2, 4, 6) if groups != 4 else (0, 2, 4, 6)}
    small = cut(model, coupling, keep)
    assert small[1].num_channels == len(keep["0"])
    assert small[1].num_groups == {1: 1, 4: 4, 8: 5}[groups]
    assert small(torch.randn(2, 3, 8, 8)).shape == (2, 4, 4, 4)
    assert (model[1].num_channels, model[1].num_groups) == (8, groups)


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
    from basisprune.coupling import cutting

    model, x = chain("conv2d")
    model[1] = nn.Identity()
    with torch.no_grad():
        model[0].weight[3:] = torch.einsum("pk,k...->p...", torch.randn(3, 3).double(), model[0].weight[:3])
    monkeypatch.setattr(moments, "shrunk", lambda covariance, _count: covariance)
    exact = lambda *given, faint: refit.least_squares(*given, ridge=0.0, faint=faint)  # noqa: E731
    monkeypatch.setattr(cutting, "least_squares", exact)
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


class Branch(nn.Module):
    """x + f(x), or relu(x + f(x))."""

    def __init__(self, width: int, *, rectifies: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.rectifies = rectifies

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.norm(self.conv2(self.conv1(x).relu()))
        return y.relu() if self.rectifies else y


class Scaled(Branch):
    """Not a sum: 2 x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def network(*kinds: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    made = {"plain": lambda: Branch(8, rectifies=False), "relu": lambda: Branch(8, rectifies=True)}
    made["scaled"] = lambda: Scaled(8, rectifies=False)
    blocks = nn.Sequential(*(made[kind]() for kind in kinds))
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), blocks, nn.Conv2d(8, 4, 1), nn.Flatten())
    for norm in (module for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)
    return decompose(net.double().eval(), scale_init=1.0), torch.randn(2, 3, 6, 6, dtype=torch.float64)


def test_blocks_are_found_by_what_they_do():
    model, x = network("plain", "relu", "scaled")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert find_blocks(model, x) == (Block("2.0", "2.0.conv2", False), Block("2.1", "2.1.conv2", True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["plain", "relu"])
def test_dropping_a_block_whose_branch_is_zero_changes_nothing(kind):
    model, x = network("plain", kind)
    for parameter in (model[2][1].norm.weight, model[2][1].norm.bias):
        nn.init.zeros_(parameter)
    blocks = find_blocks(model, x)
    small = drop_blocks(model, blocks[1:], {})
    assert len(basis_pairs(small)) == len(basis_pairs(model)) - 2
    assert torch.allclose(small(x), model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "relu"])
def test_what_stays_is_the_mean_of_what_the_branch_added(kind):
    model, x = network(kind)
    (block,) = find_blocks(model, x)
    pair, seen = basis_pairs(model)[block.last], []
    handle = pair.scaling.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    features = model[1](model[0](x))
    branch = model[2][0].norm(model[2][0].conv2(model[2][0].conv1(features).relu()))
    handle.remove()
    small = drop_blocks(model, [block], {block.last: tuple(seen[0].mean(dim=(0, 2, 3)).tolist())})
    expected = features + branch.mean(dim=(0, 2, 3), keepdim=True)
    expected = expected.relu() if kind == "relu" else expected
    assert torch.allclose(small[2][0](features), expected, rtol=0, atol=1e-10)
    shift = small[2][0][0] if kind == "relu" else small[2][0]
    assert isinstance(shift, Shift)
    assert shift.bias.dtype == torch.float64


def test_a_block_that_the_model_does_not_have_is_refused():
    model, x = network("plain", "scaled")
    with pytest.raises(PlanError, match="find its blocks again"):
        drop_blocks(model, [Block("2.7", "2.7.conv2")], {})
    with pytest.raises(PlanError, match="does not add a branch"):
        drop_blocks(model, [Block("2.1", "2.1.conv2")], {})
    assert len(find_blocks(model, x)) == 1
