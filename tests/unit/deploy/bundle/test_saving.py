"""Laws of saved networks: what is loaded is what was saved, or nothing is loaded."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import ModelCard
from networks import NETWORKS
from safetensors.torch import load_file, save_file
from tiny import CLASSES, tiny_decomposed, tiny_model
from torch import Tensor, nn

from basisprune.basis.split import decompose
from basisprune.coupling import cut, trace_coupling
from basisprune.deploy.bundle import from_pretrained, load_bundle, push_to_hub, save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, ConfigError, LayerError
from basisprune.importance import score_filters
from basisprune.plan import plan_basis, plan_filters
from basisprune.prune import prune_basis, prune_filters
from basisprune.transfer.model import transfer_model
from basisprune.types import BasisPlan, LayerPlan, LayerScores, Scores

NAMES = ["red", "green", "blue"]
FACTORIES = {"residual": "networks:Residual", "concat": "networks:Concat", "used_twice": "networks:UsedTwice"}


def half_basis(model: nn.Module) -> tuple[nn.Module, BasisPlan]:
    pairs = {name: module for name, module in model.named_modules() if type(module).__name__ == "BasisPair"}
    scores = Scores("first", {
        name: LayerScores(tuple(range(pair.rank, 0, -1)), pair.scaling.groups) for name, pair in pairs.items()
    })  # fmt: skip
    plan = plan_basis(scores, 0.4)
    return prune_basis(model, plan), plan


def half_filters(model: nn.Module, x: Tensor) -> nn.Module:
    coupling = trace_coupling(model, x)
    keep = {g.name: tuple(sorted(u for part in g.parts for u in part[: -(-len(part) // 2)])) for g in coupling.groups}
    return cut(model, coupling, keep)


def stages(model: nn.Module, x: Tensor) -> dict[str, nn.Module]:
    decomposed = decompose(model, scale_init=0.7)
    pruned, _ = half_basis(decomposed)
    double = half_filters(pruned, x)
    folded = {f"folded_{prefer}": fold(double, x, prefer) for prefer in ("macs", "none")}
    return {"dense": model, "decomposed": decomposed, "pruned": pruned, "double": double, **folded}


def same(one: nn.Module, other: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(x), other.eval()(x))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "bundle"
    return save_pretrained(tiny_decomposed(), folder, classes=NAMES, metrics={"accuracy": 0.9})


@pytest.fixture
def saved(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bundle"))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        from_pretrained(folder)
    assert str(folder) in str(caught.value)


def rewrite(folder: Path, change=lambda config: None, tensors=lambda state: None) -> None:
    """Changes a bundle as one who knows its checksums would."""
    state = load_file(folder / "model.safetensors")
    tensors(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    seal(folder, change)


def seal(folder: Path, change=lambda config: None) -> None:
    """Makes all checksums right."""
    config = json.loads((folder / "config.json").read_text())
    for name in config["files"]:
        config["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    del config["checksum"]
    change(config)
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    config["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))


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
        loaded = from_pretrained(folder)
        assert same(network, loaded, x), stage
        assert type(loaded).__name__ == type(network).__name__
        assert (loaded.input_spec, loaded.source) == (model.input_spec, model.source)
        if stage in ("pruned", "folded_macs"):
            assert same(from_pretrained(save_pretrained(loaded, tmp_path / "again")), network, x)
        for _, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
            assert not tensor.is_meta


def test_a_folded_network_without_an_architecture_of_its_own_leaves_out_the_statistics(tmp_path):
    model, x = NETWORKS["concat"](dtype=torch.float32)
    folded = fold(model, x)
    folder = save_pretrained(folded, tmp_path / "b", factory="networks:Concat", input_shape=x.shape[1:])
    names = load_file(folder / "model.safetensors").keys()
    assert sorted(name for name in names if "norm" in name) == [
        f"norm{place}.{kind}" for place in (1, 2) for kind in ("bias", "weight")
    ]
    assert same(from_pretrained(folder), folded, x)


def test_what_a_network_knows_of_itself_need_not_be_said(tmp_path):
    model = tiny_decomposed()
    model.classes = tuple(NAMES)
    for network in (model, fold(model, torch.zeros(2, 3, 16, 16))):
        bundle = load_bundle(save_pretrained(network, tmp_path / "b"))
        assert bundle.classes == bundle.model.classes == network.classes == tuple(NAMES)
        assert bundle.input_spec == bundle.model.input_spec == network.input_spec == model.input_spec


def test_a_module_of_which_only_parts_are_left_needs_a_factory(tmp_path):
    model = transfer_model(transfer_model("test_resnet", 3, input_size=32).backbone, 3, input_size=32)
    folded = fold(model, torch.zeros(2, 3, 32, 32))
    with pytest.raises(LayerError, match=r"^backbone: .* pass factory="):
        save_pretrained(folded, tmp_path / "b")
    loaded = from_pretrained(save_pretrained(folded, tmp_path / "b", factory="test_resnet"))
    assert same(loaded, folded, torch.randn(2, 3, 32, 32))


def test_all_that_is_known_comes_back(tmp_path):
    model, plan = half_basis(tiny_decomposed())
    metrics = {"accuracy": 0.91, "stages": [{"name": "dense", "macs": 12}]}
    bundle = load_bundle(save_pretrained(model, tmp_path / "b", classes=NAMES, metrics=metrics, plans=[plan]))
    assert (bundle.classes, bundle.metrics, bundle.plans) == (tuple(NAMES), metrics, (plan,))
    assert bundle.input_spec == model.input_spec
    assert bundle.versions["torch"] == version("torch")
    assert not bundle.model.training


def test_dtype_and_memory_format_are_kept(tmp_path):
    for model in (tiny_model().double(), tiny_model().bfloat16(), tiny_model().to(memory_format=torch.channels_last)):
        loaded = from_pretrained(save_pretrained(model, tmp_path / "b"))
        for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_saving_and_loading_leave_the_random_state_and_the_mode_alone(tmp_path):
    model = transfer_model("networks:Residual", 3, input_size=16).train()
    state = torch.random.get_rng_state()
    from_pretrained(save_pretrained(model, tmp_path / "b"))
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) * self.mask


def test_tied_weights_stay_tied_and_hidden_buffers_come_back(tmp_path):
    model = Tied()
    model.mask *= 3
    folder = save_pretrained(model, tmp_path / "b", factory=f"{__name__}:Tied", input_shape=(4,))
    loaded = from_pretrained(folder)
    assert loaded.two.weight is loaded.one.weight
    assert same(model, loaded, torch.randn(2, 4))
    assert "mask" not in loaded.state_dict()


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
    with pytest.raises(LayerError, match=r"Odd is neither in the architecture.* factory="):
        save_pretrained(model, tmp_path / "b", input_shape=(4,))
    save_pretrained(model, tmp_path / "b", factory=f"{__name__}:Odd", input_shape=(4,))
    model.act = torch.sigmoid
    with pytest.raises(BundleError, match="does not put out what"):
        save_pretrained(model, tmp_path / "b", factory=f"{__name__}:Odd", input_shape=(4,))
    assert same(from_pretrained(tmp_path / "b"), from_pretrained(tmp_path / "b"), torch.randn(2, 4))
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


def test_only_a_bundle_or_an_empty_folder_is_replaced(tmp_path, saved):
    empty = tmp_path / "empty"
    empty.mkdir()
    save_pretrained(tiny_model(), empty)
    save_pretrained(tiny_model(1), saved)
    assert same(from_pretrained(saved), tiny_model(1), torch.randn(2, 3, 16, 16))
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"holds notes.txt"):
        save_pretrained(tiny_model(), saved)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(BundleError, match="is no bundle"):
        save_pretrained(tiny_model(), other)
    with pytest.raises(BundleError, match="is a file or a link"):
        save_pretrained(tiny_model(), other / "config.json")


def test_a_write_that_fails_leaves_the_old_bundle_and_nothing_else(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*_):
        raise OSError("the disk is full")

    for name in ("os.fsync", "pathlib.Path.rename"):
        with monkeypatch.context() as patch:
            patch.setattr(name, fail)
            with pytest.raises(OSError, match="the disk is full"):
                save_pretrained(tiny_model(), saved)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "plans.json"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    refused(saved, f"{name}: cannot be read")


def test_a_newer_format_is_refused(saved):
    rewrite(saved, lambda config: config.update(basisprune_bundle=2))
    refused(saved, "format 2 is newer than 1.*update basisprune")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "3", '{"model_type": "bert"}', "[" * 100_000, "\x80"])
def test_another_config_is_refused(saved, text):
    (saved / "config.json").write_bytes(text.encode("latin1"))
    refused(saved, r"config.json: is (damaged|not that of)")


def test_a_missing_folder_is_refused(tmp_path):
    refused(tmp_path / "nothing", "no such folder")


def first(state: dict[str, Tensor]) -> str:
    return "backbone.0.basis.weight"


TAMPERED = {
    "1 tensors of the network are missing, first backbone.0.basis.weight": lambda state: state.pop(first(state)),
    "extra: the architecture has no such tensor": lambda state: state.update(extra=torch.zeros(3)),
    "does not run": lambda state: state.update({first(state): state[first(state)][:2].clone()}),
    "does not run on an input": lambda state: state.update({first(state): state[first(state)].half()}),
    "holds NaN": lambda state: state[first(state)].fill_(torch.nan),
    "does not put out what it did": lambda state: state[first(state)].mul_(1.1),
    "not finite": lambda state: state[first(state)].fill_(torch.inf),
}


@pytest.mark.parametrize("message", TAMPERED)
def test_tensors_that_were_changed_with_their_checksums_are_refused(saved, message):
    rewrite(saved, tensors=TAMPERED[message])
    refused(saved, message)


def test_a_checksum_that_is_wrong_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config, indent=4))
    from_pretrained(saved)  # the layout of the text does not matter
    config["metrics"]["accuracy"] = 0.99
    (saved / "config.json").write_text(json.dumps(config))
    refused(saved, "config.json: is damaged or was changed, its checksum is wrong")


def test_another_architecture_is_refused(tmp_path):
    folder = save_pretrained(transfer_model("networks:Residual", 3, input_size=16), tmp_path / "b")
    for factory in ("networks:Concat", "networks:plain"):
        with pytest.raises(BundleError, match="architecture"):
            from_pretrained(folder, factory=factory)
    for factory in ("networks:missing", "no_such_package:f", "resnet_ninety"):
        with pytest.raises(BundleError, match="its architecture cannot be built"):
            from_pretrained(folder, factory=factory)


@pytest.mark.parametrize(
    "node",
    [
        {"class": "os.system", "args": {}},
        {"class": "torch.nn.init", "args": {}},
        {"class": "torch.nn.Linear", "args": {}},
        {"class": "torch.nn.Linear", "args": {"in_features": {"tuple": ["a"], "b": 1}}},
        {"class": "torch.nn.Identity", "args": {}, "attributes": {"_modules": {"tuple": []}}},
        {"class": "torch.nn.Identity", "args": {}, "attributes": {"__class__": "x"}},
        {"same": "nowhere"},
        {"take": "nowhere"},
        {},
        [],
        None,
        3,
    ],
)
def test_a_structure_that_makes_no_sense_is_refused(saved, node):
    rewrite(saved, lambda config: config.update(structure=node))
    refused(saved, r"does not fit|may not|makes? sense|no class|no such|not one|no children|missing")


@pytest.mark.parametrize(
    "key", ["architecture", "structure", "tensors", "input", "classes", "metrics", "versions", "fingerprint", "files"]
)
@pytest.mark.parametrize("value", [None, 3, "x", [], {}, ...])
def test_a_part_that_is_missing_or_of_another_kind_never_gives_another_network(saved, key, value):
    def change(config):
        config.pop(key)
        if value is not ...:
            config[key] = value

    rewrite(saved, change)
    damaged_or_equal(saved)


def damaged_or_equal(folder: Path) -> bool:
    """Whether the bundle is refused; what is loaded otherwise must be the network that was saved."""
    try:
        loaded = from_pretrained(folder)
    except BundleError:
        return True
    assert same(loaded, tiny_decomposed(), torch.randn(2, 3, 16, 16))
    return False


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "plans.json"])
def test_flipped_cut_and_swapped_bytes_never_load_silently_wrong(saved, name):
    path, draw = saved / name, random.Random(name)
    whole = path.read_bytes()
    for _ in range(150):
        damaged = bytearray(whole)
        one, other = sorted(draw.sample(range(len(whole) + 1), 2))
        kind = draw.choice(["flip", "cut", "cut inside", "swap", "insert", "zero"])
        if kind == "flip":
            damaged[one] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del damaged[one:]
        elif kind == "cut inside":
            del damaged[one:other]
        elif kind == "swap":
            other = min(other, len(whole) - 1)
            damaged[one], damaged[other] = damaged[other], damaged[one]
        elif kind == "insert":
            damaged[one:one] = draw.randbytes(draw.randint(1, 9))
        else:
            damaged[one:other] = bytes(other - one)
        path.write_bytes(damaged)
        assert damaged_or_equal(saved) or name == "config.json" or bytes(damaged) == whole
    path.write_bytes(whole)
    assert not damaged_or_equal(saved)


def test_a_damaged_header_never_loads_silently_wrong_even_with_its_checksum(saved):
    path, draw = saved / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(150):
        damaged = bytearray(whole)
        place = draw.randrange(draw.choice([8, end]))
        damaged[place] = draw.choice([damaged[place] ^ 1 << draw.randrange(8), draw.randrange(256)])
        path.write_bytes(damaged)
        seal(saved)
        damaged_or_equal(saved)


def leaves(value, path=()):
    """The path to everything in JSON that holds nothing itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [leaf for key, item in inner for leaf in leaves(item, (*path, key))] or [path]


def test_a_changed_field_never_loads_silently_wrong_even_with_its_checksum(saved):
    config = json.loads((saved / "config.json").read_text())
    draw = random.Random(0)
    for path in leaves(config):
        if path[0] in ("checksum", "files"):
            continue
        changed = copy.deepcopy(config)
        home = changed
        for key in path[:-1]:
            home = home[key]
        old = home[path[-1]]
        others = [None, True, -1, 0, 2, 1e9, "x", [], {}, {"tuple": [7, 7]}]
        home[path[-1]] = draw.choice([other for other in others if other != old])
        (saved / "config.json").write_text(json.dumps(changed))
        seal(saved)
        damaged_or_equal(saved)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_of_two_bundles_do_not_go_together(saved, tmp_path, name, sealed):
    for number, other in enumerate([tiny_decomposed(1), half_basis(tiny_decomposed())[0], tiny_model()]):
        folder = save_pretrained(other, tmp_path / f"other{number}")
        mixed = Path(shutil.copytree(saved, tmp_path / f"mixed{number}"))
        shutil.copyfile(folder / name, mixed / name)
        if sealed:
            seal(mixed)
        with pytest.raises(BundleError):
            from_pretrained(mixed)


def test_a_bundle_comes_from_the_hub_by_its_id(saved, monkeypatch, tmp_path):
    asked = []

    def download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision))
        return str(saved)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("basisprune.deploy.bundle.hub.snapshot_download", download)
    assert same(from_pretrained("owner/name", revision="v1"), tiny_decomposed(), torch.randn(2, 3, 16, 16))
    assert asked == [("owner/name", "v1")]

    def fail(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr("basisprune.deploy.bundle.hub.snapshot_download", fail)
    with pytest.raises(BundleError, match=r"owner/name: no such folder, and the hub .*offline"):
        from_pretrained("owner/name")


def test_a_factory_that_a_bundle_from_the_hub_names_is_called_only_if_it_is_trusted(tmp_path, monkeypatch):
    folder = save_pretrained(transfer_model("networks:Residual", 3, input_size=16), tmp_path / "b")
    monkeypatch.setattr("basisprune.deploy.bundle.hub.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(BundleError, match="pass factory='networks:Residual'"):
        from_pretrained("owner/name")
    from_pretrained("owner/name", factory="networks:Residual")


class Commit:
    commit_url, repo_id = "hub/owner/name/commit/1", "owner/name"


class Hub:
    calls: ClassVar[list[tuple]] = []

    def __init__(self, token=None):
        Hub.calls = []

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))
        return Commit()

    def upload_folder(self, *, repo_id, folder_path, **_):
        files = {path.name: path.read_text(errors="ignore") for path in Path(folder_path).iterdir()}
        self.calls.append(("upload", repo_id, files))
        return Commit()


def test_a_network_or_a_folder_is_pushed_with_a_card_made_from_its_metrics(saved, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Hub)
    assert push_to_hub(saved, "owner/name") == Commit.commit_url
    assert Hub.calls[0] == ("create", "owner/name", False, True)
    files = Hub.calls[1][2]
    assert files.keys() == {"config.json", "model.safetensors", "plans.json", "README.md"}
    assert "| accuracy | 0.9 |" in files["README.md"]
    assert "red, green, blue" in files["README.md"]
    assert ModelCard(files["README.md"]).data.library_name == "basisprune"

    (saved / "README.md").unlink()
    push_to_hub(saved, "owner/name")
    assert "| accuracy | 0.9 |" in Hub.calls[1][2]["README.md"]
    assert not (saved / "README.md").exists()

    push_to_hub(tiny_model(), "owner/name", private=True, metrics={"test": {"accuracy": 0.7}})
    assert Hub.calls[0] == ("create", "owner/name", True, True)
    assert "| test.accuracy | 0.7 |" in Hub.calls[1][2]["README.md"]


def test_a_push_that_cannot_work_is_refused_before_the_hub_is_asked(saved, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", None)
    with pytest.raises(ConfigError, match="write 'owner/name'"):
        push_to_hub(saved, "name")
    with pytest.raises(ConfigError, match="are for a network"):
        push_to_hub(saved, "owner/name", metrics={})
    (saved / "plans.json").unlink()
    with pytest.raises(BundleError, match=r"plans\.json"):
        push_to_hub(saved, "owner/name")


def test_a_plan_of_each_kind_survives_and_can_be_carried_out_again(tmp_path):
    basis = BasisPlan({"backbone.0": LayerPlan((0, 2), 8, (0.5, 0.0, 1.0, 2.0, *[0.0] * 4))}, 0.5, {"scores": "taylor"})
    model, x = tiny_decomposed(), torch.randn(2, 3, 16, 16)
    slim = prune_basis(model, basis)
    coupling = trace_coupling(slim, x)
    filters = plan_filters(slim, score_filters(slim, "l1", coupling.layers), 0.2, coupling=coupling)
    double = prune_filters(slim, filters)
    plans = load_bundle(save_pretrained(double, tmp_path / "b", plans=[basis, filters])).plans
    assert plans == (basis, filters)
    assert same(prune_filters(prune_basis(model, plans[0]), plans[1]), double, x)


def test_only_plans_are_saved_as_plans(tmp_path):
    with pytest.raises(ConfigError, match="plans: dict given"):
        save_pretrained(tiny_model(), tmp_path / "b", plans=[{}])
