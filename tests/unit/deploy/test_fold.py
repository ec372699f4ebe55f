from __future__ import annotations

import copy
import io
import pickle
import sys
from typing import Any

import pytest
import torch
from networks import NETWORKS, randomise_norms
from timm.layers import BatchNormAct2d, DropPath
from torch import Tensor, nn

from basisprune import PlanConfig, decompose, measure, transfer_model
from basisprune.basis.layers import BasisPair, Shift, basis_pairs
from basisprune.deploy.fold import fold, merge_full_rank, merge_shifts
from basisprune.errors import ConfigError, LayerError, ModelError
from basisprune.planning import plan_basis
from basisprune.pruning import prune_basis
from basisprune.transfer.body import NormedConv
from basisprune.types import LayerScores, Scores

PREFERENCES = ("macs", "params", "latency", "none")
IMAGES = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def pruned(model: nn.Module, ratio: float = 0.5) -> nn.Module:
    """The model decomposed and without the weakest part of its basis vectors."""
    split = decompose(model, scale_init=0.7)
    scores = {}
    for name, pair in basis_pairs(split).items():
        groups = pair.scaling.groups
        scores[name] = LayerScores(tuple(pair.scaling.weight.flatten(1).norm(dim=0).tolist() * groups), groups)
    return prune_basis(split, plan_basis(Scores("norm", scores), ratio, PlanConfig(min_share=0.0)))


STAGES = {
    "dense": lambda model: model,
    "decomposed": lambda model: decompose(model, linear=True),
    "pruned": pruned,
}


def norms_in(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def sequential(*modules: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*modules)
    randomise_norms(model)
    return model.double().eval()


class OnlyForeign(pickle.Unpickler):
    """Refuses whatever comes from this package."""

    def find_class(self, module: str, name: str) -> Any:
        assert not module.startswith("basisprune"), f"{module}.{name}"
        return super().find_class(module, name)


def loaded_without_us(model: nn.Module) -> nn.Module:
    return OnlyForeign(io.BytesIO(pickle.dumps(model))).load()


@pytest.mark.parametrize("prefer", PREFERENCES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("network", NETWORKS)
def test_folding_keeps_the_output_and_the_model(network: str, stage: str, prefer: Any) -> None:
    model, inputs = NETWORKS[network]()
    model = STAGES[stage](model).train()
    before = copy.deepcopy(model.state_dict())
    result = fold(model, inputs, prefer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(part.training for part in model.modules())
    assert not any(part.training for part in result.modules())
    assert not any(parameter.requires_grad for parameter in result.parameters())
    expected = model.eval()(inputs)
    torch.testing.assert_close(result(inputs), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loaded_without_us(result)(inputs), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["plain", "residual", "grouped", "depthwise", "one_dimensional", "three_dimensional"])
def test_norms_go_where_only_they_read_the_conv(name: str) -> None:
    model, inputs = NETWORKS[name]()
    assert norms_in(fold(pruned(model), inputs)) == []


def test_norms_stay_where_something_else_reads_the_conv() -> None:
    model, inputs = NETWORKS["concat"]()
    assert norms_in(fold(model, inputs)) == ["norm1", "norm2"]


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_that_stays_is_left_with_a_weight_and_a_bias(affine: bool) -> None:
    norm = nn.BatchNorm2d(3, affine=affine).double().eval()
    nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
    nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    model = nn.Sequential(nn.ReLU(), norm)
    result = fold(model, IMAGES)
    assert sorted(result.state_dict()) == ["1.bias", "1.weight"]
    assert sum(parameter.numel() for parameter in result.parameters()) == 6
    torch.testing.assert_close(result(IMAGES), model(IMAGES), rtol=0, atol=1e-12)
    assert {"1.running_mean", "1.running_var"} <= model.state_dict().keys()


def test_a_norm_with_an_activation_that_stays_keeps_it() -> None:
    model = sequential(nn.ReLU(), BatchNormAct2d(3))
    result: Any = fold(model, IMAGES)
    assert sorted(result.state_dict()) == ["1.bias", "1.weight"]
    torch.testing.assert_close(result(IMAGES), model(IMAGES), rtol=0, atol=1e-12)


class Wired(nn.Module):
    """A conv and two norms, put together by a function."""

    def __init__(self, wiring: Any, size: int = 6) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(size)
        self.conv = nn.Conv2d(3, size, 3, padding=1)
        self.other = nn.BatchNorm2d(size)
        self.wiring = wiring
        randomise_norms(self)
        self.double().eval()

    def forward(self, x: Tensor) -> Any:
        return self.wiring(self, x)


def both(net: Wired, x: Tensor) -> Any:
    y = net.conv(x)
    return net.norm(y), y


def view(net: Wired, x: Tensor) -> Any:
    y = net.conv(x)
    return net.norm(y) + y[:, :1]


def in_place(net: Wired, x: Tensor) -> Any:
    return net.norm(net.conv(x).relu_())


KEPT = {
    "the output is returned too": (both, ["norm", "other"]),
    "a view of it is read": (view, ["norm", "other"]),
    "something happens in between": (in_place, ["norm", "other"]),
    "two norms read it": (lambda net, x: net.norm(y := net.conv(x)) + net.other(y), ["norm", "other"]),
    "two norms read two calls": (lambda net, x: net.norm(net.conv(x)) + net.other(net.conv(-x)), ["norm", "other"]),
    "the norm reads more": (lambda net, x: net.norm(net.norm(net.conv(x))), ["norm", "other"]),
    "the norm alone reads it": (lambda net, x: net.norm(net.conv(x)), ["other"]),
    "one norm reads both calls": (lambda net, x: net.norm(net.conv(x)) + net.norm(net.conv(-x)), ["other"]),
    "the chain ends in a norm": (lambda net, x: net.other(net.norm(net.conv(x))), ["other"]),
}


@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("split", [False, True])
def test_the_flow_of_data_decides_which_norms_go(case: str, split: bool) -> None:
    wiring, kept = KEPT[case]
    model: nn.Module = Wired(wiring)
    model = decompose(model) if split else model
    result = fold(model, IMAGES)
    assert norms_in(result) == kept
    torch.testing.assert_close(result(IMAGES), model(IMAGES), rtol=0, atol=1e-12)


def test_a_norm_without_statistics_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).double()
    assert norms_in(fold(model, IMAGES)) == ["1"]


def test_a_norm_without_weights_goes() -> None:
    assert norms_in(fold(sequential(nn.Conv2d(3, 4, 1)).append(nn.BatchNorm2d(4, affine=False).double()), IMAGES)) == []


def test_of_a_norm_with_an_activation_the_activation_is_left() -> None:
    model = sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4))
    result: Any = fold(model, IMAGES)
    assert isinstance(result[1], nn.ReLU)
    torch.testing.assert_close(result(IMAGES), model(IMAGES))


@pytest.mark.parametrize(("shape", "kept"), [((5, 3), []), ((5, 4, 3), ["1"])])
def test_a_linear_layer_takes_the_norm_of_its_features(shape: tuple[int, ...], kept: list[str]) -> None:
    model = decompose(sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), linear=True)
    assert norms_in(fold(model, torch.randn(shape, dtype=torch.float64))) == kept


@pytest.mark.parametrize(("rank", "kind"), [(7, nn.Sequential), (8, nn.Conv2d)])
@pytest.mark.parametrize("prefer", ["macs", "params"])
def test_pairs_below_the_break_even_rank_stay_pairs(rank: int, kind: type, prefer: Any) -> None:
    # 72 r + 8 r < 72 * 8 up to rank 7
    model = decompose(nn.Conv2d(8, 8, 3, bias=False))
    scores = Scores("", {"": LayerScores((1.0,) * 8)})
    result = fold(prune_basis(model, plan_basis(scores, 1 - rank / 8)), torch.randn(1, 8, 9, 9), prefer)
    assert type(result) is kind


def test_multiply_adds_of_transposed_convs_count_input_and_output_places() -> None:
    # At stride 4 the 1x1 conv works at 16 times as many places: 16*9*(8 r) + 16*16*(8 r) > 16*9*64 at r = 4.
    model = pruned(nn.ConvTranspose2d(8, 8, 3, stride=4, padding=0, output_padding=1, bias=False).double(), 0.5)
    inputs = torch.randn(1, 8, 4, 4, dtype=torch.float64)
    assert type(fold(model, inputs, "macs")) is nn.ConvTranspose2d
    assert type(fold(model, inputs, "params")) is nn.Sequential


def test_none_keeps_every_pair() -> None:
    model, inputs = NETWORKS["plain"]()
    result: Any = fold(decompose(model), inputs, "none")
    assert all(type(result[i]) is nn.Sequential for i in (0, 3, 6))


def test_a_pair_still_answers_like_the_conv() -> None:
    model = sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, dilation=2), nn.ReLU())
    result: Any = fold(decompose(model), IMAGES, "none")
    conv, pair = model[0], result[0]
    for name in ("kernel_size", "stride", "padding", "dilation", "groups", "in_channels", "out_channels"):
        assert getattr(pair, name) == getattr(conv, name)
    assert pair.weight.device == conv.weight.device
    assert sorted(pair.state_dict()) == ["basis.weight", "scaling.bias", "scaling.weight"]
    twin = copy.deepcopy(pair).float()
    assert twin.weight.dtype == torch.float32


def test_dropout_goes() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(), DropPath(0.5)).eval()
    assert all(type(part) is nn.Identity for part in fold(model, IMAGES).children())


def test_an_inserted_norm_leaves_the_conv_alone() -> None:
    model = sequential(NormedConv(nn.Conv2d(3, 8, 3)))
    result: Any = fold(decompose(model), IMAGES)
    assert type(result[0]) is nn.Conv2d
    torch.testing.assert_close(result(IMAGES), decompose(model)(IMAGES))


def test_an_inserted_norm_that_cannot_go_stays_with_its_conv() -> None:
    normed = NormedConv(nn.Conv2d(3, 8, 3)).double()
    normed.norm = nn.GroupNorm(2, 8).double()
    result: Any = fold(nn.Sequential(normed), IMAGES)
    assert [type(part) for part in result[0]] == [nn.Conv2d, nn.GroupNorm]
    assert result[0].kernel_size == (3, 3)


@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet", "test_byobnet"])
def test_a_transfer_model_becomes_plain_and_keeps_its_names(backbone: str) -> None:
    model = transfer_model(backbone, 4, input_size=32)
    images = torch.randn(2, 3, 32, 32)
    result = fold(model, images)
    assert result.state_dict().keys() <= {*model.state_dict(), *(f"{name}.bias" for name, _ in model.named_modules())}
    assert not any(type(part).__module__.startswith("basisprune") for part in result.modules())
    again = copy.deepcopy(loaded_without_us(result))
    torch.testing.assert_close(again(images), model(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again(images[:1]), model(images[:1]), rtol=1e-4, atol=1e-5)


def test_a_folded_transfer_model_knows_its_input_and_classes_as_plain_data() -> None:
    model = transfer_model("test_resnet", 3, input_size=32)
    model.classes = ["a", "b", "c"]  # type: ignore[assignment]
    result: Any = fold(model, torch.randn(2, 3, 32, 32))
    for each in (result, copy.deepcopy(result), fold(result, torch.randn(2, 3, 32, 32))):
        assert (each.input_spec, each.source, each.classes) == (model.input_spec, model.source, ("a", "b", "c"))
    result.classes = None
    assert result.classes is None
    plain: Any = loaded_without_us(result)
    assert plain.about["input_spec"]["size"] == (32, 32)
    assert measure(result).input_shape == (3, 32, 32)


def test_folding_twice_changes_nothing_more() -> None:
    model, inputs = NETWORKS["residual"]()
    once = fold(pruned(model), inputs)
    twice = fold(once, inputs)
    assert once.state_dict().keys() == twice.state_dict().keys()
    assert torch.equal(once(inputs), twice(inputs))


def test_in_place_the_model_itself_is_folded() -> None:
    model, inputs = NETWORKS["plain"]()
    model = pruned(model)
    expected = model(inputs)
    assert fold(model, inputs, inplace=True) is model
    assert not any(isinstance(part, BasisPair) for part in model.modules())
    torch.testing.assert_close(model(inputs), expected)


def test_a_conv_that_is_called_with_more_than_its_input_becomes_dense() -> None:
    class Upsample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.ConvTranspose2d(3, 8, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x, output_size=[26, 26])

    result: Any = fold(decompose(Upsample().double()), IMAGES, "none")
    assert type(result.conv) is nn.ConvTranspose2d


def test_layers_are_timed_in_the_runtime_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["basisprune.deploy.fold"]
    asked = {}

    def pair_is_faster(forms: Any, shapes: Any, repeats: int) -> dict[str, list[float]]:
        asked.update(shapes)
        return {name: [2.0, 1.0, *[3.0] * (len(listed) - 2)] for name, listed in forms.items()}

    monkeypatch.setattr(module, "onnx_layer_seconds", pair_is_faster)
    model, inputs = NETWORKS["plain"]()
    result: Any = fold(decompose(model), inputs, "latency", runtime="onnxruntime")
    assert asked == {"0": (2, 3, 12, 12), "3": (2, 8, 12, 12), "6": (2, 12, 6, 6)}
    assert all(type(result[i]) is nn.Sequential for i in (0, 3, 6))


def test_forms_are_really_timed_in_onnxruntime() -> None:
    model, inputs = NETWORKS["residual"](dtype=torch.float32)
    model = pruned(model)
    result = fold(model, inputs, "latency", runtime="onnxruntime")
    torch.testing.assert_close(result(inputs), model(inputs), rtol=1e-4, atol=1e-5)


def test_half_precision_folds() -> None:
    model, inputs = NETWORKS["plain"](dtype=torch.bfloat16)
    assert next(fold(pruned(model.float()).bfloat16(), inputs).parameters()).dtype == torch.bfloat16


def test_the_first_layer_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["basisprune.deploy.forms"]
    exact = module._with_norm

    def off_in_one_layer(layer: Any, norm: Any) -> Any:
        result = exact(layer, norm)
        if result.weight.shape[:2] == (12, 8):
            result.bias.data += 0.1
        return result

    monkeypatch.setattr(module, "_with_norm", off_in_one_layer)
    model, inputs = NETWORKS["plain"]()
    with pytest.raises(LayerError, match=r"^4: is the first layer"):
        fold(model, inputs)


def test_what_cannot_be_compared_is_refused() -> None:
    model = nn.Conv2d(3, 8, 1)
    nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        fold(model, torch.ones(1, 3, 4, 4))


def test_an_unknown_preference_or_runtime_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefer: 'size' given"):
        fold(nn.ReLU(), IMAGES, "size")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="runtime: 'tpu' given"):
        fold(nn.ReLU(), IMAGES, runtime="tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 1])
def test_hooks_are_not_lost_in_silence(place: int) -> None:
    model: Any = decompose(sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    model[place].register_forward_hook(lambda *_: None)
    with pytest.raises(LayerError, match=rf"^{place}: has hooks"):
        fold(model, IMAGES)


def test_a_backbone_that_cannot_be_traced_is_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward_features(self, x: Tensor) -> Tensor:
            return self.conv(x) if x.sum() > 0 else self.conv(x) + 1

    model = transfer_model(Fickle(), 4, input_size=32)
    with pytest.raises(LayerError, match=r"Fickle\.forward_features cannot be traced"):
        fold(model, torch.ones(1, 3, 32, 32))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("network", NETWORKS)
def test_settling_keeps_the_output_and_what_is_deployed(network: str, stage: str) -> None:
    model, inputs = NETWORKS[network]()
    model = STAGES[stage](model).train()
    before = copy.deepcopy(model.state_dict())
    result = merge_full_rank(model, inputs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert result.training
    torch.testing.assert_close(result.eval()(inputs), model.eval()(inputs), rtol=0, atol=1e-12)
    sizes = [sum(weight.numel() for weight in fold(each, inputs, "params").parameters()) for each in (model, result)]
    assert sizes[0] == sizes[1]
    assert pairs_in(merge_full_rank(result, inputs)) == pairs_in(result)


def test_only_pairs_that_pay_are_left_when_settled() -> None:
    split = decompose(sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)))
    scores = {name: LayerScores(tuple(map(float, range(pair.rank)))) for name, pair in basis_pairs(split).items()}
    small = prune_basis(split, plan_basis(Scores("given", {"1": scores["1"]}), 0.75, PlanConfig(min_share=0.0)))
    assert pairs_in(merge_full_rank(split, IMAGES)) == []
    assert pairs_in(merge_full_rank(small, IMAGES)) == ["1"]


def test_vectors_that_went_do_not_come_back_when_settled() -> None:
    split = decompose(sequential(nn.Conv2d(16, 16, 1)))
    scores = Scores("given", {"0": LayerScores(tuple(map(float, range(16))))})
    less = prune_basis(split, plan_basis(scores, 0.25, PlanConfig(min_share=0.0)))
    images = torch.randn(2, 16, 4, 4, dtype=torch.float64)
    assert type(fold(less, images, "params")[0]) is nn.Conv2d  # one layer is smaller
    assert pairs_in(merge_full_rank(less, images)) == ["0"]


def pairs_in(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, BasisPair)]


class Asking(nn.Module):
    """A backbone whose code looks at what it is given; on a black image, nothing of that shows."""

    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.conv, self.asks = nn.Conv2d(3, 8, 3, bias=False), asks

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * 2 if self.asks(x) else x


@pytest.mark.parametrize("asks", [lambda x: isinstance(x, Tensor), lambda x: not hasattr(x, "anything")])
def test_what_a_backbone_asks_of_tensors_stays_as_it_is(asks: Any) -> None:
    model = transfer_model(Asking(asks), 3, input_size=16).eval()
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(fold(model, torch.zeros(1, 3, 16, 16))(x), model(x))


def test_a_backbone_that_does_something_else_when_it_is_traced_is_refused() -> None:
    model = transfer_model(Asking(lambda x: type(x) is Tensor), 3, input_size=16)
    with pytest.raises(LayerError, match="something else when it is traced"):
        fold(model, torch.zeros(1, 3, 16, 16))


class Sum(nn.Module):
    """Two branches added, then shifted."""

    def __init__(self, *, between: nn.Module) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 3, padding=1)
        self.norm, self.between = nn.BatchNorm2d(6), between
        self.shift = Shift(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.between(self.one(x) + self.norm(self.other(x)))).mean(dim=(2, 3))


def made(between: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Sum(between=between).double().eval(), torch.randn(2, 3, 5, 5, dtype=torch.float64)


def test_a_shift_behind_a_sum_goes_into_the_norm_before_it():
    model, x = made(nn.Identity())
    folded = fold(model, x)
    assert isinstance(folded.shift, nn.Identity)
    assert torch.allclose(folded(x), model(x), rtol=0, atol=1e-12)
    assert isinstance(model.shift, Shift)


def test_where_that_would_change_something_the_shift_stays_as_a_plain_layer():
    model, x = made(nn.ReLU())
    folded = fold(model, x)
    assert type(folded.shift) is nn.Conv2d
    assert torch.allclose(folded(x), model(x), rtol=0, atol=1e-12)


def test_a_model_without_shifts_is_left_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    assert merge_shifts(model, (torch.zeros(1, 3, 4, 4),)) is model
