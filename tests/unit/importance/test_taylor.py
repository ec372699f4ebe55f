"""Scores read the batches of any task."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import basis_pairs
from basisprune.costs import measure
from basisprune.coupling import trace_coupling
from basisprune.errors import DataError, ModelError, TrainingError
from basisprune.importance import basis_loss, score_filters, taylor_scores
from basisprune.importance.loss import filter_loss, joint_loss
from basisprune.tasks import Task, segmentation
from basisprune.types import Scores

NAMED = segmentation(read=lambda batch: (batch["x"], batch["y"]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 3, padding=1))


def signals(count: int = 24, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def as_dicts(data: TensorDataset, size: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"x": inputs, "y": masks} for inputs, masks in DataLoader(data, size)]


def test_scores_read_the_batches_of_a_task():
    data = signals()
    pairs = decompose(network(), scale_init=1.0, basis="loss", batches=as_dicts(data), loss=NAMED)
    plain = [(inputs, masks) for inputs, masks in DataLoader(data, 8)]
    for scores in (taylor_scores, lambda *a, **k: basis_loss(*a, **k).scores):
        assert scores(pairs, as_dicts(data), loss=NAMED) == scores(pairs, plain, loss=nn.functional.cross_entropy)
    for method in ("taylor", "loss", "hrank"):
        named = score_filters(network(), method, ["0"], as_dicts(data), loss=NAMED)
        assert named == score_filters(network(), method, ["0"], plain)


def decomposed(network: str, **options) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model, x = NETWORKS[network]()
    model = decompose(model, scale_init=0.8, **options)
    return model, [(x, torch.tensor([0, 1])), (2 * x - 0.5, torch.tensor([3, 2])), (x[:1], torch.tensor([1]))]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_scores_are_the_mean_over_batches_of_gradient_times_scale_squared(network, linear):
    model, batches = decomposed(network, linear=linear)
    by_hand = copy.deepcopy(model)
    expected = {name: torch.zeros_like(pair.scaling.scale) for name, pair in basis_pairs(by_hand).items()}
    for images, labels in batches:
        by_hand.zero_grad()
        F.cross_entropy(by_hand(images), labels).backward()
        for name, pair in basis_pairs(by_hand).items():
            expected[name] += (pair.scaling.scale.grad * pair.scaling.scale).detach() ** 2 / len(batches)
    scores = taylor_scores(model, batches)
    assert scores.method == "taylor"
    assert list(scores.layers) == list(expected)
    for name, layer in scores.layers.items():
        torch.testing.assert_close(torch.tensor(layer.values, dtype=torch.float64), expected[name])
        assert layer.groups == basis_pairs(model)[name].scaling.groups
    assert Scores.from_json(scores.to_json()) == scores


@pytest.mark.parametrize("network", NETWORKS)
def test_means_are_the_true_means_of_the_basis_features(network):
    model, batches = decomposed(network, linear=True)
    features: dict[str, list[Tensor]] = {name: [] for name in basis_pairs(model)}
    handles = []
    for name, pair in basis_pairs(model).items():
        axis = 1 if pair.scaling.spatial_dims else -1

        def note(_module, args, into=features[name], axis=axis):
            into.append(args[0].detach().movedim(axis, 0).flatten(1))

        handles.append(pair.scaling.register_forward_pre_hook(note))
    for images, _ in batches:
        model(images)
    for handle in handles:
        handle.remove()
    for name, layer in taylor_scores(model, batches).layers.items():
        truth = torch.cat(features[name], 1).mean(1)
        torch.testing.assert_close(torch.tensor(layer.means, dtype=torch.float64), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("network", NETWORKS)
def test_all_vectors_of_a_layer_together_cost_what_the_layer_costs(network):
    model, batches = decomposed(network, linear=True)
    scores = taylor_scores(model, batches).layers
    for layer in measure(model, tuple(batches[0][0].shape[1:])).layers:
        if layer.rank is not None:
            assert layer.macs == scores[layer.name].macs * layer.rank
            pair = basis_pairs(model)[layer.name]
            assert pair.basis.weight.numel() + pair.scaling.weight.numel() == scores[layer.name].parameters * layer.rank


def test_what_a_vector_costs_is_what_was_counted_by_hand():
    model, batches = decomposed("transposed")
    costs = {name: (layer.parameters, layer.macs) for name, layer in taylor_scores(model, batches).layers.items()}
    assert costs == {
        "0": (3 * 9 + 8, 6 * 6 * (3 * 9 + 8)),
        "3": (8 * 16 + 6, 6 * 6 * 8 * 16 + 12 * 12 * 6),  # reads 6x6, writes 12x12
        "5": (3 * 9 + 2, 12 * 12 * 3 * 9 + 24 * 24 * 2),
    }


def test_a_layer_that_never_runs_has_weights_but_no_multiply_adds():
    model, batches = decomposed("plain")
    model.spare = copy.deepcopy(model[0])
    model.forward = lambda x: nn.Sequential(*list(model.children())[:-1])(x)
    spare = taylor_scores(model, batches).layers["spare"]
    assert (spare.parameters, spare.macs, set(spare.values), set(spare.means)) == (35, 0, {0.0}, {0.0})


def test_the_model_is_left_as_it_was():
    model, batches = decomposed("plain")
    model.train()
    model[1].eval()
    next(iter(basis_pairs(model).values())).scaling.scale.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    needs = [parameter.requires_grad for parameter in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        scores = taylor_scores(model, batches)
    assert all(any(layer.values) for layer in scores.layers.values())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == needs
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_vector_that_cannot_matter_scores_zero():
    model, batches = decomposed("plain")
    pair = basis_pairs(model)["0"]
    pair.scaling.scale.data[2] = 0
    pair.scaling.weight.data[:, 3] = 0
    values = taylor_scores(model, batches).layers["0"].values
    assert values[2] == values[3] == 0
    assert min(values[:2]) > 0


def test_another_loss_can_be_asked_for():
    model, batches = decomposed("plain")
    doubled = taylor_scores(model, batches, loss=lambda out, y: 2 * F.cross_entropy(out, y))
    for name, layer in taylor_scores(model, batches).layers.items():
        assert doubled.layers[name].values == pytest.approx([4 * value for value in layer.values])


def test_what_cannot_be_scored_is_refused():
    model, batches = decomposed("plain")
    with pytest.raises(ModelError, match=r"call decompose\(model\) first"):
        taylor_scores(NETWORKS["plain"]()[0], batches)
    with pytest.raises(DataError, match="no batch came"):
        taylor_scores(model, [])
    with pytest.raises(DataError, match=r"torch\.uint8"):
        taylor_scores(model, [(torch.zeros(1, 3, 12, 12, dtype=torch.uint8), torch.zeros(1).long())])
    with pytest.raises(DataError, match=r"\(images, labels\) are needed, Tensor given"):
        taylor_scores(model, [batches[0][0]])
    images, labels = batches[0]
    with pytest.raises(TrainingError, match="the loss of batch 1 is nan"):
        taylor_scores(model, [(images, labels), (images * torch.nan, labels)])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class ByParts(nn.Module):
    """Computes its loss by parts of it, as detectors do, so that no hook on the network itself is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv1d(2, 6, 3, padding=1), nn.Conv1d(6, 2, 1)

    def forward(self, *args, **kwargs):
        return self.head(self.body(*args, **kwargs).relu())

    def loss(self, inputs, masks):
        return nn.functional.cross_entropy(self.head(self.body(inputs).relu()), masks)


def test_examples_are_counted_where_batches_are_read():
    torch.manual_seed(0)
    model = decompose(ByParts(), scale_init=1.0)
    batches = [(torch.randn(4, 2, 8), torch.randint(0, 2, (4, 8))) for _ in range(2)]
    own = Task("own", None, lambda said, true: said, model_loss=lambda model, *batch: model.loss(*batch))
    coupling = trace_coupling(model, batches[0][0])
    for score in (
        taylor_scores,
        lambda model, batches, loss: joint_loss(model, coupling, batches, loss=loss)[0].scores,
        lambda model, batches, loss: joint_loss(model, coupling, batches, loss=loss)[1].scores,
        lambda model, batches, loss: filter_loss(model, coupling, batches, loss=loss).scores,
    ):
        assert score(model, batches, loss=own) == score(model, batches, loss=nn.functional.cross_entropy)
