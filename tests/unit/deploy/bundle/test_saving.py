"""Laws of saved networks: what is loaded is what was saved, or nothing is loaded."""

from __future__ import annotations

import copy
from importlib.metadata import version

import pytest
import torch
from bundles import NAMES, half_basis, same, stages
from networks import NETWORKS
from tiny import CLASSES, tiny_decomposed, tiny_model
from torch import Tensor, nn

import basisprune
from basisprune.coupling import trace_coupling
from basisprune.deploy.bundle import from_pretrained, load_bundle, save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, ConfigError
from basisprune.importance import score_filters
from basisprune.planning import plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.transfer.model import transfer_model
from basisprune.types import BasisPlan, Block, BlockPlan, LayerPlan

FACTORIES = {"residual": "networks:Residual", "concat": "networks:Concat", "used_twice": "networks:UsedTwice"}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_stage_of_every_network_is_loaded_as_it_was_saved(name, tmp_path):
    model, x = NETWORKS[name](dtype=torch.float32)
    for stage, network in stages(model, x).items():
        before = {key: value.clone() for key, value in network.state_dict().items()}
        folder = save_pretrained(network, tmp_path / stage, factory=FACTORIES.get(name), input_shape=x.shape[1:])
        loaded = from_pretrained(folder, trust_remote_code=name in FACTORIES)
        assert same(network, loaded, x), stage
        assert repr(loaded) == repr(network)
        after = loaded.state_dict()
        assert before.keys() == after.keys() == network.state_dict().keys()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        grads = [[p.requires_grad for p in net.parameters()] for net in (network, loaded)]
        assert grads[0] == grads[1]


@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet", "networks:Residual", "module"])
def test_every_stage_of_a_transfer_model_is_loaded_as_it_was_saved(backbone, tmp_path):
    model = tiny_model() if backbone == "module" else transfer_model(backbone, CLASSES, input_size=32)
    x = torch.randn(2, *model.input_spec.shape)
    for stage, network in stages(model, x).items():
        folder = save_pretrained(network, tmp_path / stage)
        needs_code = backbone == "networks:Residual" and not stage.startswith("folded")
        loaded = from_pretrained(folder, trust_remote_code=needs_code)
        assert same(network, loaded, x), stage
        assert type(loaded).__name__ == type(network).__name__
        assert (loaded.input_spec, loaded.source) == (model.input_spec, model.source)
        if stage in ("pruned", "folded_macs"):
            again = save_pretrained(loaded, tmp_path / "again")
            assert same(from_pretrained(again, trust_remote_code=needs_code), network, x)
        for _, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
            assert not tensor.is_meta


def test_what_a_network_knows_of_itself_need_not_be_said(tmp_path):
    model = tiny_decomposed()
    model.classes = tuple(NAMES)
    for network in (model, fold(model, torch.zeros(2, 3, 16, 16))):
        bundle = load_bundle(save_pretrained(network, tmp_path / "b"))
        assert bundle.classes == bundle.model.classes == network.classes == tuple(NAMES)
        assert bundle.input_spec == bundle.model.input_spec == network.input_spec == model.input_spec


def test_all_that_is_known_comes_back(tmp_path):
    model, plan = half_basis(tiny_decomposed())
    metrics = {"accuracy": 0.91, "stages": [{"name": "dense", "macs": 12}]}
    bundle = load_bundle(save_pretrained(model, tmp_path / "b", classes=NAMES, metrics=metrics, plans=[plan]))
    assert (bundle.classes, bundle.metrics, bundle.plans) == (tuple(NAMES), metrics, (plan,))
    assert bundle.input_spec == model.input_spec
    assert bundle.versions["torch"] == version("torch")
    assert not bundle.model.training


def test_saving_and_loading_leave_the_random_state_and_the_mode_alone(tmp_path):
    model = transfer_model("networks:Residual", 3, input_size=16).train()
    state = torch.random.get_rng_state()
    from_pretrained(save_pretrained(model, tmp_path / "b"), trust_remote_code=True)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training


class Odd(nn.Module):
    """Keeps a part of what it does where no file can hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


def test_a_network_that_would_be_loaded_otherwise_is_not_saved(tmp_path):
    model = Odd()
    save_pretrained(model, tmp_path / "b", factory=f"{__name__}:Odd", input_shape=(4,))
    before = copy.deepcopy(model)
    model.act = torch.sigmoid
    model.layer.weight.data *= 2
    with pytest.raises(BundleError, match="does not output what"):
        save_pretrained(model, tmp_path / "b", factory=f"{__name__}:Odd", input_shape=(4,))
    loaded, x = from_pretrained(tmp_path / "b", trust_remote_code=True), torch.randn(2, 4)
    assert same(loaded, before, x)
    assert not same(loaded, model, x)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    broken = tiny_model()
    broken.classifier.weight.data[0, 0] = torch.nan
    with pytest.raises(BundleError, match="not finite"):
        save_pretrained(broken, tmp_path / "b")
    with pytest.raises(ConfigError, match="2\\) given, 3 names are needed"):
        save_pretrained(tiny_model(), tmp_path / "b", classes=["a", "b"])
    with pytest.raises(ConfigError, match="input_shape: Conv2d does not know it"):
        save_pretrained(nn.Conv2d(3, 4, 1), tmp_path / "b")
    with pytest.raises(BundleError, match="no JSON"):
        save_pretrained(tiny_model(), tmp_path / "b", metrics={"accuracy": float("nan")})
    with pytest.raises(BundleError, match="as fold returned it"):
        save_pretrained(torch.fx.symbolic_trace(nn.ReLU()), tmp_path / "b", input_shape=(3, 16, 16))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_each_kind_survives_and_can_be_carried_out_again(tmp_path):
    basis = BasisPlan({"backbone.0": LayerPlan((0, 2), 8, (0.5, 0.0, 1.0, 2.0, *[0.0] * 4))}, 0.5, {"scores": "taylor"})
    model, x = tiny_decomposed(), torch.randn(2, 3, 16, 16)
    slim = prune_basis(model, basis)
    coupling = trace_coupling(slim, x)
    filters = plan_filters(slim, score_filters(slim, "l1", coupling.layers), 0.2, coupling=coupling)
    double, gone = prune_filters(slim, filters), BlockPlan((Block("layer1.1", "layer1.1.conv2", rectifies=True),))
    plans = load_bundle(save_pretrained(double, tmp_path / "b", plans=[basis, filters, gone])).plans
    assert plans == (basis, filters, gone)
    assert same(prune_filters(prune_basis(model, plans[0]), plans[1]), double, x)


def test_only_plans_are_saved_as_plans(tmp_path):
    with pytest.raises(ConfigError, match=r"plans: .* given, Sequence"):
        basisprune.save_pretrained(tiny_model(), tmp_path / "b", plans=[{}])


def test_a_network_that_stands_alone_needs_no_factory(tmp_path):
    network = transfer_model("tiny:tiny_backbone", 3, input_size=16)
    loaded = from_pretrained(save_pretrained(network, tmp_path / "b"))
    assert loaded.source == network.source
    assert same(network, loaded, torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model: 3 given"),
        ({"model": torch.compile(nn.ReLU())}, "model: a compiled network given"),
        ({"model": nn.LazyLinear(3)}, "model: a network with lazy layers"),
        ({"model": nn.Linear(3, 3, device="meta")}, "model: a network on the meta device"),
        ({"classes": "abc"}, "classes: 'abc' given"),
        ({"classes": [1, 2, 3]}, r"classes: \[1, 2, 3\] given"),
        ({"metrics": [1]}, r"metrics: \[1\] given"),
        ({"plans": 3}, "plans: 3 given"),
        ({"factory": 3}, "factory: 3 given"),
        ({"input_shape": "3"}, "input_shape: '3' given"),
        ({"input_shape": (3, -1, 4)}, r"input_shape: \(3, -1, 4\) is not a shape"),
        ({"input_shape": (3, 10**6, 10**6)}, "input_shape: .* is not a shape"),
        ({"folder": 3}, "folder: 3 given"),
        ({"folder": "x" * 5000}, "which cannot be a path"),
        ({"folder": "x" * 300}, "too long"),
        ({"folder": "~nouser/x"}, "home directory"),
        ({"folder": "a\0b"}, "which cannot be a path"),
    ],
)
def test_arguments_of_wrong_types_are_refused_by_name(tmp_path, given, message):
    arguments = {"model": tiny_model(), "folder": tmp_path / "b", **given}
    with pytest.raises(ConfigError, match=message):
        basisprune.save_pretrained(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_scripted_network_is_refused_by_name(tmp_path):
    with pytest.warns(match="deprecated"):
        scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(ConfigError, match="model: a scripted network given"):
        save_pretrained(scripted, tmp_path / "b")
