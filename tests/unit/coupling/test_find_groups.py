"""Laws of what tracing finds: the groups, what is frozen, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch_pruning
from networks import NETWORKS
from torch import Tensor, nn
from zeroing import without_channels

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import BasisPair, BasisScalingConv, basis_pairs
from basisprune.coupling import cut, trace_coupling
from basisprune.errors import ModelError
from basisprune.importance import score_filters
from basisprune.importance.filters import FILTER_SCORES
from basisprune.planning import plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.types import BasisPlan, Coupling, LayerPlan


@torch.library.custom_op("basisprune_test::shuffle", mutates_args=())
def exotic(x: Tensor) -> Tensor:
    """An operation that nobody has heard of."""
    return x.flip(1)


class Exotic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return exotic(x)


def tail(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)]


def third(coupling: Coupling) -> dict[str, tuple[int, ...]]:
    """A third of each part of each group."""
    keep = {}
    for group in coupling.groups:
        left = max(1, len(group.parts[0]) // 3)
        keep[group.name] = tuple(sorted(unit for part in group.parts for unit in part[:left]))
    return keep


@pytest.mark.parametrize("name", NETWORKS)
def test_a_coupling_survives_json(name: str) -> None:
    coupling = trace_coupling(*NETWORKS[name]())
    assert Coupling.from_json(coupling.to_json()) == coupling


def test_an_unknown_operation_freezes_what_enters_it_and_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), Exotic(), nn.Conv2d(8, 4, 1), *tail(4))
    coupling = trace_coupling(model, torch.zeros(1, 3, 8, 8))
    assert coupling.unknown_ops == ("basisprune_test.shuffle.default",)
    assert [group.name for group in coupling.groups] == ["0", "3"]
    assert "basisprune_test.shuffle" in coupling.frozen["1"]


def test_outputs_and_ignored_layers_are_frozen() -> None:
    model, images = NETWORKS["plain"]()
    coupling = trace_coupling(model, images, ignored_layers=["3"])
    assert [group.name for group in coupling.groups] == ["0", "6"]
    assert set(coupling.frozen) == {"3", "11"}
    with pytest.raises(ModelError, match="nowhere"):
        trace_coupling(model, images, ignored_layers=["nowhere"])


def test_a_network_that_does_not_run_is_refused() -> None:
    with pytest.raises(ModelError, match="does not run on the example inputs"):
        trace_coupling(nn.Linear(3, 4), torch.zeros(1, 5))


def test_residual_layers_form_one_group() -> None:
    coupling = trace_coupling(*NETWORKS["residual"]())
    assert [group.layers for group in coupling.groups] == [("stem.0", "conv2"), ("conv1",), ("down", "conv3")]


def test_concatenated_layers_are_cut_on_their_own() -> None:
    coupling = trace_coupling(*NETWORKS["concat"]())
    assert [(group.name, group.size) for group in coupling.groups] == [("stem", 6), ("conv1", 4), ("conv2", 8)]
    places = {(axis.parameter, axis.dim): axis.index for axis in coupling["conv1"].axes}
    assert places["conv2.weight", 1] == (6, 7, 8, 9)


def test_grouped_filters_form_parts() -> None:
    coupling = trace_coupling(*NETWORKS["grouped"]())
    assert coupling["0"].size == 2  # four groups of two channels are read by the same two weights
    # twelve filters in four groups of three, read by a conv with two groups: both lose equally many, two at a time
    assert coupling["3"].parts == ((0, 1, 2), (3, 4, 5))
    assert coupling["6"].parts == ((0, 1, 2, 3), (4, 5, 6, 7))


class Shuffle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def test_shuffled_channels_are_cut_at_the_same_places() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Shuffle(), nn.Conv2d(8, 4, 1), *tail(4))
    coupling = trace_coupling(model, torch.zeros(1, 3, 4, 4))
    assert coupling["0"].size == 4
    assert coupling["0"].axes[0].index == (0, 4, 1, 5, 2, 6, 3, 7)


class Halves(nn.Module):
    """Holds a number of channels that its code takes for granted."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.split(x, [self.width, self.width], dim=1)
        return torch.cat([self.inner(first), second], dim=1)


def test_numbers_that_mirror_shapes_are_repaired() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Halves(), nn.Conv2d(8, 4, 1), *tail(4))
    images = torch.randn(2, 3, 4, 4)
    coupling = trace_coupling(model, images)
    keep = {"0": (0, 2, 3)}
    smaller = cut(model, coupling, keep)
    assert (smaller[1].width, smaller[0].out_channels, smaller[2].in_channels) == (3, 6, 3 + 4)
    torch.testing.assert_close(smaller(images), without_channels(model, coupling, keep)(images))


class RawKernel(nn.Module):
    """Convolves with a tensor of its own; a buffer unless it is to be trained."""

    def __init__(self, inputs: int, outputs: int, *, trained: bool) -> None:
        super().__init__()
        kernel = torch.randn(outputs, inputs, 3, 3)
        self.kernel = nn.Parameter(kernel) if trained else nn.Buffer(kernel)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.kernel, padding=1, groups=x.shape[1] // self.kernel.shape[1])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("method", FILTER_SCORES)
def test_filters_in_a_tensor_of_its_own_are_frozen_with_the_reason_and_others_are_scored(trained, method) -> None:
    raw = RawKernel(8, 6, trained=trained)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), raw, nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ReLU(), *tail(4)).eval()
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    coupling = trace_coupling(model, images)
    assert coupling.layers == ("0", "3")
    assert coupling.frozen["1"] == "its filters lie in 'kernel', a tensor of its own that no score knows"
    scores = score_filters(model, method, coupling.layers, [(images, labels)])
    smaller = prune_filters(model, plan_filters(model, scores, 0.3, coupling=coupling))
    assert smaller(images).shape == (4, 3)
    assert smaller[1].kernel.shape[0] == 6


def test_a_fixed_blur_goes_with_the_channels_it_blurs() -> None:
    blur = RawKernel(1, 8, trained=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), blur, nn.Conv2d(8, 4, 1), *tail(4)).eval()
    coupling = trace_coupling(model, torch.zeros(1, 3, 8, 8))
    assert coupling["0"].filters == {"0": 8}
    assert {axis.parameter for axis in coupling["0"].axes} >= {"0.weight", "1.kernel", "2.weight"}


def test_blur_pools_of_timm_do_not_keep_scores_from_the_network_around_them() -> None:
    model = timm.create_model("mobilenetv4_conv_blur_medium", num_classes=3).eval()
    images = torch.randn(2, 3, 64, 64)
    coupling = trace_coupling(model, images)
    plan = plan_filters(model, score_filters(model, "l1", coupling.layers), 0.3, coupling=coupling)
    assert prune_filters(model, plan)(images).shape == (2, 3)


def test_a_grouped_pair_with_one_vector_in_each_group_still_lends_its_filters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), *tail(12)).double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pairs = decompose(model, scale_init=1.0)
    slim = prune_basis(pairs, BasisPlan({"1": LayerPlan((0, 3, 6, 9), basis_pairs(pairs)["1"].rank)}, 0.5))
    assert slim[1].rank == slim[1].scaling.groups == 4
    coupling = trace_coupling(slim, images)
    assert coupling["1.scaling"].parts == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    keep = {"1.scaling": (0, 2, 3, 4, 7, 8, 9, 11)}
    torch.testing.assert_close(cut(slim, coupling, keep)(images), without_channels(slim, coupling, keep)(images))


class Particular(nn.Module):
    """Looks at a number of its own between its layers, where no module says whose channels these are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.gain = nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Sequential(*tail(6))

    def forward(self, x: Tensor) -> Tensor:
        assert len(self.gain) == 8
        return self.head(self.second(self.first(x) * self.gain))


def test_only_the_group_that_fails_by_itself_is_frozen_when_the_network_fails_between_its_modules() -> None:
    coupling = trace_coupling(Particular(), torch.zeros(1, 3, 4, 4))
    assert [group.name for group in coupling.groups] == ["second"]
    assert "cutting it fails in the network" in coupling.frozen["first"]


class Stubborn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 8, -1).unflatten(2, (4, 4))


def test_a_group_that_fails_the_trial_is_frozen_with_the_reason() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), Stubborn(), nn.Conv2d(8, 4, 1), *tail(4))
    coupling = trace_coupling(model, torch.zeros(1, 3, 4, 4))
    assert [group.name for group in coupling.groups] == ["0", "3"]
    assert "cutting it fails in 2: " in coupling.frozen["1"]


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.head, self.extra = nn.Sequential(*tail(6)), nn.Sequential(nn.Conv2d(8, 5, 1), *tail(5))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        y = self.head(self.body(x))
        return (y, self.extra(x)) if self.training else y


def test_heads_that_only_training_reaches_are_cut_too() -> None:
    model, images = Auxiliary(), torch.randn(2, 3, 4, 4)
    coupling = trace_coupling(model, images)
    smaller = cut(model, coupling, third(coupling)).train()
    assert [tuple(out.shape) for out in smaller(images)] == [(2, 3), (2, 3)]
    assert smaller.extra[0].in_channels == 2


def test_basis_vectors_are_left_to_basis_pruning() -> None:
    scaling = BasisScalingConv(torch.randn(6, 5, 1, 1), scale=torch.rand(5), bias=torch.randn(6))
    pair = BasisPair(nn.Conv2d(4, 5, 3, padding=1, bias=False), scaling)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), pair, nn.ReLU(), *tail(6))
    coupling = trace_coupling(model, torch.zeros(1, 3, 4, 4))
    assert [group.layers for group in coupling.groups] == [("0",), ("1.scaling",)]
    assert "basis pruning" in coupling.frozen["1.basis"]
    smaller = cut(model, coupling, {"0": (0, 1), "1.scaling": (2, 3, 4)})
    assert (smaller[1].in_channels, smaller[1].rank, smaller[1].out_channels) == (2, 5, 3)
    images = torch.randn(2, 3, 4, 4)
    keep = {"0": (0, 1), "1.scaling": (2, 3, 4)}
    torch.testing.assert_close(smaller(images), without_channels(model, coupling, keep)(images))


def rows_of_heads(model: nn.Module, coupling: Coupling, keep: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """For each layer of queries, keys and values: how many rows every head keeps of each of the three."""
    found = {}
    for group in coupling.groups:
        for axis in group.axes:
            layer, _, kind = axis.parameter.rpartition(".")
            if layer.endswith("attn.qkv") and kind == "weight" and axis.dim == 0:
                parts = 3 * model.get_submodule(layer.removesuffix(".qkv")).num_heads
                rows = torch.tensor(axis.index).view(group.size, -1)[list(keep[group.name])].flatten()
                found[layer] = (rows // (len(model.get_parameter(axis.parameter)) // parts)).bincount().tolist()
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2}),
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 64, "window_size": 2, "depths": (2, 2), "num_heads": (3, 6)},
        ),
    ],
)
def test_attention_is_cut_evenly_in_all_heads(name: str, options: dict[str, object]) -> None:
    model = timm.create_model(name, num_classes=3, **options).eval()
    images = torch.randn(2, 3, options["img_size"], options["img_size"])
    coupling = trace_coupling(model, images)
    keep = third(coupling)
    smaller = cut(model, coupling, keep)
    smaller(images).sum().backward()
    assert smaller(images).shape == (2, 3)
    assert not coupling.unknown_ops
    assert len(coupling.frozen) == 1
    kept = rows_of_heads(model, coupling, keep)
    assert kept.keys() == {name for name, _ in model.named_modules() if name.endswith("attn.qkv")}
    for layer, rows in kept.items():
        heads = model.get_submodule(layer.removesuffix(".qkv")).num_heads
        assert rows == [smaller.get_submodule(layer).out_features // (3 * heads)] * 3 * heads
        assert rows[0] > 0


def test_torch_pruning_finds_the_same_couplings() -> None:
    model, images = timm.create_model("resnet18", num_classes=3).eval(), torch.randn(1, 3, 32, 32)
    coupling = trace_coupling(model, images)
    graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=images)
    names = {module: name for name, module in model.named_modules()}
    assert len(coupling.groups) == 12  # four residual streams, and the first conv of each of eight blocks
    for group in coupling.groups:
        layer = model.get_submodule(group.name)
        theirs = set()
        for dependency, places in graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, [1]):
            module, reads = dependency.target.module, "in_channels" in dependency.handler.__name__
            if module in names:
                theirs |= {(f"{names[module]}.weight", int(reads), place) for place in places}
        unit = coupling[group.name].axes[0].index.index(1)
        ours = set()
        for axis in group.axes:
            if axis.parameter.endswith(".weight"):
                times = len(axis.index) // group.size
                ours |= {(axis.parameter, axis.dim, p) for p in axis.index[unit * times : (unit + 1) * times]}
        assert ours == theirs


class Caching(nn.Module):
    """Keeps a result of its first run, as some attention layers do with their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cache = nn.Conv2d(4, 4, 1), {}

    def forward(self, x: Tensor) -> Tensor:
        if "shift" not in self.cache:
            self.cache["shift"] = self.conv(torch.ones(1, 4, 1, 1)).mean()
        return self.conv(x) + self.cache["shift"]


def test_nothing_of_the_trace_stays_in_the_network() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Caching(), *tail(4))
    assert trace_coupling(model, torch.zeros(1, 3, 4, 4)).groups
    assert not model[1].cache
    assert all(not vars(p) for p in model.parameters())


@pytest.mark.parametrize("pattern", ["0", "0*", ["0.0"], "module"])
@pytest.mark.parametrize("split", [False, True])
def test_ignored_layers_may_be_containers_pairs_patterns_and_modules(pattern: Any, split: bool) -> None:
    inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    net: nn.Module = nn.Sequential(inner, nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1))
    if split:
        net = decompose(net)
    ignored = net.get_submodule("0") if pattern == "module" else pattern
    coupling = trace_coupling(net, torch.zeros(1, 3, 8, 8), ignored_layers=ignored)
    name = "0.0.scaling" if split else "0.0"
    assert coupling.frozen[name] == "it is ignored as asked"
    assert len(coupling.groups) == 1


class Cross(nn.Module):
    """Attention whose keys and values are shaped by one number, as in the decoders of Hugging Face."""

    def __init__(self, width: int, heads: int, *, apart: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.head_dim, self.apart = heads, width // heads, apart

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        mixed = mixed.transpose(1, 2)
        # the fewest lengths that code writes down: one for queries, keys and values, or that of all heads too
        mixed = mixed.reshape(len(x), -1, self.heads * self.head_dim) if self.apart else mixed.flatten(2)
        return self.o(mixed)


class Decoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, *, apart: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.layers = nn.ModuleList(Cross(width, heads, apart=apart) for _ in range(layers))
        self.queries = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        memory = self.patches(images).flatten(2).transpose(1, 2)
        x = self.queries(memory[:, :3])
        for layer in self.layers:
            x = x + layer(x, memory)
        return self.head(x.mean(1))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(("width", "heads", "layers"), [(16, 4, 1), (16, 4, 3), (8, 4, 3), (32, 2, 2)])
def test_groups_are_free_to_be_cut_apart_whatever_number_their_code_shares(apart, width, heads, layers) -> None:
    model, images = Decoder(width, heads, layers, apart=apart).eval(), torch.randn(2, 3, 16, 16)
    coupling = trace_coupling(model, images)
    assert {"layers.0.k", "layers.0.v"} <= set(coupling.layers) | coupling.frozen.keys()
    keeps = [{group.name: third(coupling)[group.name]} for group in coupling.groups]  # one by one
    rng = np.random.default_rng(0)
    for _ in range(8):  # and at random
        lengths = {group.name: int(rng.integers(1, len(group.parts[0]) + 1)) for group in coupling.groups}
        keeps.append(
            {
                group.name: tuple(sorted(unit for part in group.parts for unit in part[: lengths[group.name]]))
                for group in coupling.groups
            }
        )
    for keep in keeps:
        smaller = cut(model, coupling, keep)
        torch.testing.assert_close(smaller(images), without_channels(model, coupling, keep)(images))
