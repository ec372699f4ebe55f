"""Laws of bundles that were forged to do harm: no code runs, nothing is fetched, and no machine is taken."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import json
import pickle
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bundles import refused, rewrite
from torch import Tensor, nn

from basisprune.deploy import allowed, graphs
from basisprune.deploy.bundle import (
    config,
    from_pretrained,
    limits,
    loading,
    save_pretrained,
    steps,
    structure,
)
from basisprune.deploy.bundle.config import parse_config, parse_plans
from basisprune.deploy.bundle.saving import refuse_unsaveable
from basisprune.deploy.fold import fold
from basisprune.errors import BasisPruneError, BundleError, LayerError
from basisprune.torchkit.surgery import refuse_hidden_names
from basisprune.transfer.model import transfer_model

X = {"step": 0}


def step(op: str, target: str, *args: object, **kwargs: object) -> dict[str, object]:
    return {"op": op, "target": target, "args": list(args), "kwargs": kwargs}


@pytest.fixture(scope="module")
def graph_bundle(tmp_path_factory) -> Path:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = fold(transfer_model(Wrapped(body), 3, input_size=8), torch.zeros(2, 3, 8, 8))
    return save_pretrained(model, tmp_path_factory.mktemp("graph") / "bundle")


class Wrapped(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward_features(self, x: Tensor) -> Tensor:
        return self.body(x) + x.shape[0] * 0


@pytest.fixture
def forge(graph_bundle, tmp_path):
    """A bundle whose graph says what it is told to, before its own steps give its own output."""
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "forged"))

    def write(*steps: dict[str, object], output: object = None) -> Path:
        def change(config):
            first, *_, last = config["network"]["graph"]
            last = last | ({} if output is None else {"args": [output]})
            config["network"]["graph"] = [first, *steps, last | ({} if output else {"args": [{"step": len(steps)}]})]

        rewrite(folder, change)
        return folder

    return write


def appended(folder: Path, *steps: dict[str, object]) -> Path:
    """The bundle with steps whose values nobody reads, so that its output stays what it was; `{"step": -1}` is last."""

    def change(config):
        *before, last = config["network"]["graph"]
        config["network"]["graph"] = [*before, *renumbered(steps, len(before) - 1), last]

    rewrite(folder, change)
    return folder


def renumbered(value: object, by: int) -> object:
    if isinstance(value, dict) and value.keys() == {"step"}:
        return {"step": value["step"] + by if value["step"] else 0}
    if isinstance(value, dict):
        return {key: renumbered(item, by) for key, item in value.items()}
    return [renumbered(item, by) for item in value] if isinstance(value, (list, tuple)) else value


GLOBALS = "forward.__func__.__globals__.get"


def issue(part: str, canary: Path) -> list[dict[str, object]]:
    code = f"__import__('os').mkdir({str(canary)!r})"
    return [
        step("placeholder", "images"),
        step("call_module", part, X),
        step("call_module", f"{part}.{GLOBALS}", "__builtins__"),
        step("call_function", "operator.getitem", {"step": 2}, "eval"),
        step("call_module", f"{part}.__setattr__", "pwn", {"step": 3}),
        step("call_module", f"{part}.pwn", code),
        step("output", "output", {"step": 1}),
    ]


def test_attributes_of_a_module_are_not_modules(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "forged"))

    def change(config):
        config["structure"] = {
            "class": "torch.nn.Module",
            "order": ["x"],
            "children": {"x": {"class": "torch.nn.Flatten"}},
        }
        config["network"] |= {"alone": True, "graph": issue("x", tmp_path / "canary")}
        config["fingerprint"] = {"shape": [1, 192], "values": [], "norm": 0.0}
        config["tensors"] = {}

    rewrite(folder, change, lambda state: state.clear())
    with pytest.raises(BundleError):
        from_pretrained(folder)
    assert not (tmp_path / "canary").exists()


TARGETS = {
    "call_module": [
        *(
            "classifier.__class__",
            "classifier.forward",
            f"classifier.{GLOBALS}",
            "forward",
            "children",
            "named_modules",
        ),
        *("classifier.load_state_dict", "classifier.weight", "classifier.register_forward_hook", "__class__", "train"),
        *(
            "classifier._call_impl",
            "_modules",
            "_modules.classifier",
            "classifier._parameters.get",
            "recompile",
            "0",
            "",
        ),
        *("to_folder", "graph", "about.pop", "guard.check", "_steps", "compile", "classifier.bias", "body.append"),
    ],
    "get_attr": [
        *("__class__", "classifier", "classifier.__dict__", "classifier.weight.data", "classifier.weight.__class__"),
        *("about", "graph", "training", "classifier.training", "classifier.in_features", "_buffers", "_parameters", ""),
        *("classifier.weight.shape", "forward", GLOBALS),
    ],
    "call_function": [
        *("torch.load", "torch.save", "torch.hub.load", "builtins.eval", "builtins.getattr", "operator.methodcaller"),
        *(
            "operator.attrgetter",
            "operator.setitem",
            "functional.boolean_dispatch",
            "torch.ops",
            "print",
            "__class__",
            "",
        ),
    ],
    "call_method": [
        *(
            "__reduce_ex__",
            "__class__",
            "__getattribute__",
            "numpy",
            "apply_",
            "map_",
            "tofile",
            "register_hook",
            "data",
        ),
        *("storage", "share_memory_", "set_", "resize_", "to", "backward", "format", "get", "append", ""),
    ],
}


@pytest.mark.parametrize(("op", "target"), [(op, target) for op, names in TARGETS.items() for target in names])
def test_a_step_names_only_what_is_in_the_structure_or_in_a_table(forge, op, target):
    with pytest.raises(BundleError):
        from_pretrained(forge(step(op, target, X)))


ARGUMENTS = [
    step("call_function", "getattr", X, "__class__"),
    step("call_function", "getattr", X, "data"),
    step("call_function", "getattr", X, "__class__", "shape"),
    step("call_function", "getattr", X, {"step": 0}),
    step("call_function", "getattr", "shape", "shape"),
    step("call_function", "getattr", X, "shape", default=1),
    step("call_function", "torch.add", X, X, out=X),
    step("call_function", "torch.cat", [X, X], out=X),
    step("call_function", "functional.relu", X, generator=X),
    step("call_method", "sum", X, out=X),
    step("call_method", "split", "a b", " "),
    step("call_method", "view", [1]),
    step("call_method", "size", {"dict": [["size", 1]]}),
    step("call_method", "add"),
    step("call_function", "operator.getitem", {"dict": [["a", 1]]}, "__class__"),
    step("call_function", "operator.mod", "%s", X),
    step("call_function", "operator.iadd", [1], [2]),
]


@pytest.mark.parametrize("each", ARGUMENTS, ids=str)
def test_arguments_express_nothing_but_values(forge, each):
    with pytest.raises(BundleError):
        from_pretrained(forge(each))


def test_the_tables_hold_no_function_that_could_do_anything_but_compute():
    everything = [*allowed.FUNCTIONS.values(), *(method.function for method in allowed.METHODS.values())]
    assert all(
        getattr(each, "__module__", None)
        in (
            None,
            "_operator",
            "math",
            "basisprune.deploy.allowed",  # expect, set_item and _to, which compute too
            "torch",
            "torch.nn.functional",
            "torch._tensor",
            "torch.functional",
            "torch._C._nn",
            "torch._jit_internal",
        )
        for each in everything
    )
    assert "out" not in allowed.KEYWORDS


def looks_up_names(function: ast.AST) -> bool:
    """Whether a function takes or sets an attribute by a name that is not written there."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    lookups = (
        "getattr",
        "setattr",
        "hasattr",
        "delattr",
        "get_submodule",
        "get_parameter",
        "get_buffer",
        "eval",
        "exec",
    )
    return any(
        getattr(call.func, "id", getattr(call.func, "attr", "")) in (*lookups, "import_module", "__import__")
        and not all(isinstance(argument, ast.Constant) for argument in call.args[1:2])
        for call in calls
    )


def test_nothing_is_looked_up_by_a_name_while_a_bundle_is_loaded():
    modules = (allowed, config, graphs, limits, loading, steps, structure)
    found = {
        f"{module.__name__.rpartition('.')[2]}.{node.name}"
        for module in modules
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.FunctionDef) and looks_up_names(node)
    }
    # `getattr` is a method of fx.Tracer, which is told what was looked up.
    saving = {"structure._arguments", "graphs._adopt"}
    assert found == saving


ATTRIBUTES = [
    *(
        {name: value}
        for name in ("forward", "_call_impl", "__call__", "_forward_hooks", "training", "_modules", "T_destination")
        for value in (1, "x", [1])
    ),
    *({"in_features": value} for value in ("in_features", ["x"], 10**30, {"tuple": ["x"]})),
    {"register_forward_hook": None},
]


@pytest.mark.parametrize("text", ["\x1b[2J", "__import__('os')", "a" * 65, "é"])
def test_layers_are_built_with_words_alone(text):
    with pytest.raises(BundleError):
        allowed.check_arguments("torch.nn.ReLU", {"inplace": text})
    allowed.check_arguments("torch.nn.Upsample", {"mode": "bilinear"})


@pytest.mark.parametrize(
    "given",
    [
        {"kernel_size": 3, "dilation": "same"},
        {"in_features": "gelu"},
        {"kernel_size": ("same", 3)},
        {"kernel_size": (1 << 20) + 1},
        {"dilation": [3, 1 << 31]},
    ],
)
def test_constructors_compute_with_small_numbers_alone(given):
    with pytest.raises(BundleError):
        allowed.check_arguments("timm.layers.CondConv2d", given)
    allowed.check_arguments("timm.layers.CondConv2d", {"padding": "same", "kernel_size": (3, 3)})


FAULTS = {
    "plans": lambda: parse_plans(b"[" + b"0," * 500_000 + b"0]"),
    "steps": lambda: parse_config(b'{"architecture": {"graph": [' + b"0," * 500_000 + b"0]}}"),
    "names": lambda: parse_config(named_badly("children")),
    "more names": lambda: parse_config(named_badly("parameters")),
}


def named_badly(what: str) -> bytes:
    return json.dumps({"structure": {what: {f"-{number}": True for number in range(50_000)}}}).encode()


@pytest.mark.parametrize("name", FAULTS)
def test_many_faults_of_a_file_take_no_memory(name):
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match="does not make sense"):
            FAULTS[name]()
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["config.json", "plans.json"])
def test_what_no_network_needs_is_not_read(saved, name):
    (saved / name).write_bytes(b" " * (8 << 20) + (saved / name).read_bytes())
    refused(saved, "at most 8,388,608|cannot be read")


def test_many_names_of_one_module_are_checked_in_little_time():
    module = nn.Module()
    module._parameters.update(dict.fromkeys((f"a{number}" for number in range(100_000)), None))
    refuse_hidden_names(module)


@pytest.mark.parametrize("attributes", ATTRIBUTES, ids=str)
def test_attributes_hide_nothing_and_keep_their_kind(saved, attributes):
    rewrite(
        saved,
        lambda config: config["structure"]["children"]["classifier"].setdefault("attributes", {}).update(attributes),
    )
    refused(saved, "is not one that a bundle may set|is not a name for a part")


def test_attributes_that_no_layer_has_are_left_out(saved):
    rewrite(saved, lambda config: config["structure"]["children"]["dropout"].update(attributes={"marker": "x"}))
    assert not hasattr(from_pretrained(saved).dropout, "marker")


@pytest.mark.parametrize("name", ["forward", "training", "_modules", "register_buffer", "eval", "_backward_hooks", "p"])
@pytest.mark.parametrize("place", ["children", "parameters", "buffers"])
def test_no_part_takes_the_place_of_something_else(saved, name, place):
    what = {"children": {"class": "torch.nn.Identity"}, "parameters": True, "buffers": [True, True]}[place]
    more = {"order": [name]} if place == "children" else {}
    rewrite(
        saved,
        lambda config: config["structure"]["children"].update(
            dropout={
                "class": "torch.nn.Dropout",
                place: {name: what},
                **more,
            }
        ),
    )
    refused(saved, "has something else by that name|missing")


@pytest.mark.parametrize(
    "name", ["classifier.forward", "classifier._forward_hooks", "dropout.training", "pool.x", "classifier._modules"]
)
def test_tensors_take_the_place_of_nothing(saved, name):
    rewrite(saved, lambda config: config["tensors"].setdefault("aliases", {}).update({name: "classifier.weight"}))
    refused(saved, "is not an attribute that a bundle may set")


NOT_LISTED = (
    "LSTM",
    "DataParallel",
    "LazyLinear",
    "Transformer",
    "TransformerEncoderLayer",
    "CrossEntropyLoss",
    "ParameterDict",
)


@pytest.mark.parametrize(
    "name",
    [f"torch.nn.{name}" for name in NOT_LISTED]
    + [
        *(
            "torch.nn.functional",
            "torch.nn.modules.Linear",
            "torch.nn.Linear.forward",
            "timm.layers.HybridEmbed",
            "os.system",
            "torch.nn.Bilinear",  # whose work grows with the product of its sizes, and nobody counts it
        ),
        *("timm.layers.create_act", "basisprune.KeptModel", "torch.nn.quantized.Linear", "Linear", "", "torch.nn."),
    ],
)
def test_only_listed_classes_are_built(saved, name):
    rewrite(saved, lambda config: config["structure"]["children"].update(dropout={"class": name}))
    refused(saved, "is not a class that a bundle may name")


def named(saved: Path, backbone: str, insert_norm: bool | None = None) -> None:
    told = {"backbone": backbone, "alone": False, "traced": False, "insert_norm": insert_norm}

    def change(config):
        config["network"].update(told)
        config["structure"] = {}

    rewrite(saved, change)


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18", "hf_hub:timm/resnet18", "local-dir:/tmp", "local_dir:x"])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_network_that_lies_elsewhere_is_refused(saved, name, trusted, monkeypatch):
    monkeypatch.setattr("timm.create_model", None)
    named(saved, name)
    refused(saved, "lies in another folder or on the hub", trust_remote_code=trusted)


def test_a_network_of_torchvision_fetches_nothing(saved, monkeypatch):
    fetched: list[object] = []
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", lambda *given, **_: fetched.append(given))
    monkeypatch.setattr(
        "torchvision._internally_replaced_utils.load_state_dict_from_url", lambda *given, **_: fetched.append(given)
    )
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *given, **_: fetched.append(given))
    named(saved, "torchvision:lraspp_mobilenet_v3_large")
    with pytest.raises(BundleError):
        from_pretrained(saved)
    assert fetched == []


@pytest.mark.parametrize("insert_norm", [None, True])
@pytest.mark.parametrize("name", ["vit_giant_patch14_224", "torchvision:regnet_y_128gf"])
def test_a_network_much_larger_than_its_file_is_not_built(saved, insert_norm, name):
    named(saved, name, insert_norm)
    refused(saved, "bytes of memory")


@pytest.mark.parametrize("shape", [[3, 64, 64], [3, 16], [1, 16, 16], [16, 16, 3], [3, 16, 16, 1]])
def test_an_input_of_two_shapes_is_refused(saved, shape):
    rewrite(saved, lambda config: config["input"].update(shape=shape))
    refused(saved, "not that of its spec")


def test_what_a_stranger_names_is_not_called_when_the_network_is_saved_again(
    forge, graph_bundle, tmp_path, monkeypatch
):
    called: list[str] = []
    module = ModuleType("stranger")
    module.backbone = lambda: called.append("backbone")
    monkeypatch.setitem(sys.modules, "stranger", module)
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "named"))
    rewrite(folder, lambda config: config["network"].update(backbone="stranger:backbone"))
    model = from_pretrained(folder)
    assert model.source.backbone == "stranger:backbone"
    model.graph.call_function(torch.special.expm1, (next(iter(model.graph.nodes)),))  # no graph can be written any more
    for attempt in (lambda: save_pretrained(model, tmp_path / "again"), lambda: refuse_unsaveable(model)):
        with contextlib.suppress(BasisPruneError):
            attempt()
    assert called == []


def test_a_factory_of_the_caller_does_not_vouch_for_what_a_file_names(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "named"))
    rewrite(folder, lambda config: config["network"].update(backbone="stranger:backbone"))
    model = from_pretrained(folder, factory="mine:network")  # which a graph has no use for
    assert (model.source.backbone, model.source.is_trusted) == ("stranger:backbone", False)


def test_the_input_of_a_graph_is_named_here(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "named"))
    rewrite(folder, lambda config: config["network"]["graph"][0].update(target="a-b"))
    model = from_pretrained(folder)
    images = torch.rand(2, *model.input_spec.shape)
    assert torch.equal(pickle.loads(pickle.dumps(model))(images), model(images))


COSTS = {
    "every size is within its limit, all together are not": [
        step("call_method", "expand", X, 100_000, 3, 8, 8),
        *(step("call_function", "torch.mul", {"step": 1}, 2) for _ in range(20)),
        step("call_function", "torch.stack", [{"step": n} for n in range(2, 22)]),
    ],
    "a tensor in many pieces": [
        step("call_method", "expand", X, 10**5, 3, 8, 8),
        step("call_method", "unbind", {"step": 1}),
    ],
    "pieces of one number": [
        step("call_method", "expand", X, 10**5, 3, 8, 8),
        step("call_function", "torch.split", {"step": 1}, 1),
    ],
    "pieces by keyword": [
        step("call_method", "expand", X, 10**5, 3, 8, 8),
        step("call_method", "split", {"step": 1}, split_size=1),
    ],
    "work of which no product tells": [
        step("call_method", "expand", X, 50_000, 3, 8, 8),
        *(step("call_method", "exp", {"step": 1}) for _ in range(3000)),
    ],
    "a size that a tensor holds": [
        step("call_method", "max", X, 1),
        step("call_function", "operator.getitem", {"step": 1}, 1),
        step("call_method", "sum", {"step": 2}),
        step("call_method", "expand", X, {"step": 3}, 3, 8, 8),
    ],
    "a mask": [step("call_function", "operator.eq", X, X), step("call_function", "operator.getitem", X, {"step": 1})],
    "repeated": [step("call_method", "repeat", X, 10**9, 1, 1, 1)],
    "tiled": [step("call_method", "tile", X, {"tuple": [10**9, 1, 1, 1]})],
    "each repeated": [step("call_method", "repeat_interleave", X, repeats=10**9)],
    "repeated as a tensor says": [
        step("call_method", "max", X, 1),
        step("call_function", "operator.getitem", {"step": 1}, 1),
        step("call_method", "repeat_interleave", X, {"step": 2}),
    ],
    "padded": [step("call_function", "functional.pad", X, {"tuple": [10**9, 10**9]})],
    "enlarged": [step("call_function", "functional.interpolate", X, scale_factor=10**6)],
    "pooled": [step("call_function", "functional.adaptive_avg_pool2d", X, 10**6)],
    "a kernel for each pixel": [
        step("call_function", "functional.interpolate", X, size=1200),
        step("call_function", "functional.max_pool2d", {"step": 1}, 599, 1),
    ],
}


@pytest.mark.parametrize("name", COSTS)
def test_a_graph_takes_neither_memory_nor_time(graph_bundle, tmp_path, name):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))
    refusal = r"at a time|are allowed|floating-point operations|is unknown"
    with pytest.raises(BundleError, match=refusal):
        from_pretrained(appended(folder, *COSTS[name]))


BATCH = [step("call_function", "getattr", X, "shape"), step("call_function", "operator.getitem", {"step": 1}, 0)]


@pytest.mark.parametrize("name", ["numbers", "tensors"])
def test_a_graph_that_is_small_for_one_image_only_is_refused_for_more(graph_bundle, tmp_path, name):
    squares = [step("call_function", "operator.mul", {"step": n}, {"step": n}) for n in range(2, 7)]
    if name == "tensors":
        grown = step("call_method", "expand", X, {"step": 7}, -1, -1, -1, -1)
        more = [grown, step("call_function", "torch.mul", {"step": 8}, 2)]
    else:
        more = [step("call_function", "operator.add", {"step": 7}, 1)]
    folder = appended(Path(shutil.copytree(graph_bundle, tmp_path / "b")), *BATCH, *squares, *more)
    model = from_pretrained(folder)
    model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(BundleError, match=r"too large|are allowed"):
        model(torch.zeros(7, 3, 8, 8))
    with pytest.raises(BundleError, match=r"too large|are allowed"):
        copy.deepcopy(model)(torch.zeros(7, 3, 8, 8))


def test_calls_of_modules_are_counted(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))
    inner: dict[str, object] = {"class": "torch.nn.Identity"}
    for _ in range(12):
        inner = {"class": "torch.nn.Sequential", "order": ["a", "b"], "children": {"a": inner, "b": None}}
    path, part = "many", inner
    while "children" in part:
        part["children"]["b"] = {"same": f"{path}.a"}
        path, part = f"{path}.a", part["children"]["a"]

    def change(config):
        config["structure"]["children"]["many"] = inner
        config["structure"]["order"] = [*config["structure"]["order"], "many"]

    rewrite(folder, change)
    with pytest.raises(BundleError, match="calls more than"):
        from_pretrained(appended(folder, *(step("call_module", "many", X) for _ in range(100))))


def test_a_graph_leaves_its_weights_alone(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))
    steps = [step("get_attr", "classifier.weight"), step("call_method", "add_", {"step": 1}, 0)]
    with pytest.raises(BundleError, match="changes its own weights"):
        from_pretrained(appended(folder, *steps))


def test_a_method_is_for_tensors_alone():
    with pytest.raises(LayerError, match="is for tensors"):
        allowed.METHODS["split"]("a b", " ")
    assert torch.equal(allowed.METHODS["abs"](torch.tensor([-1.0])), torch.tensor([1.0]))


def test_no_part_is_built_over_and_over(saved):
    node = {"class": "torch.nn.Sequential", "order": ["a"] * 10**5, "children": {"a": {"class": "torch.nn.Identity"}}}
    rewrite(saved, lambda config: config["structure"]["children"].update(dropout=node))
    refused(saved, "names a child twice")


def test_the_number_of_parts_is_limited_while_they_are_built(saved, monkeypatch):
    monkeypatch.setattr(structure, "_MOST_NODES", 20)
    children = {f"a{number}": {"class": "torch.nn.Identity"} for number in range(30)}
    node = {"class": "torch.nn.Sequential", "order": list(children), "children": children}
    rewrite(saved, lambda config: config["structure"]["children"].update(dropout=node))
    refused(saved, "parts of their own")


def hidden(config, name: str) -> None:
    """Put a module into the structure under a name that means something else, and a step that calls it."""
    config["structure"].setdefault("children", {})[name] = {"class": "torch.nn.Identity"}
    config["structure"]["order"] = [*config["structure"].get("order", []), name]
    steps = config["network"]["graph"]
    steps.insert(1, step("call_module", name, X))
    for later in steps[2:]:
        later["args"] = moved(later["args"])


def moved(value: object) -> object:
    """The arguments after a step was put in at place 1."""
    if isinstance(value, dict) and "step" in value:
        return {"step": value["step"] + (value["step"] >= 1)}
    if isinstance(value, dict):
        return {key: moved(each) for key, each in value.items()}
    return [moved(each) for each in value] if isinstance(value, list) else value


HIDING = (
    *(
        "input_spec",
        "source",
        "classes",
        "to_folder",
        "recompile",
        "graph",
        "guard",
        "_run",
        "forward",
        "code",
        "_code",
    ),
    *("__globals__", "_\uff3fglobals__", "\uff46orward", "_wrapped_call", "None", "lambda"),
)


@pytest.mark.parametrize("name", HIDING)
def test_no_part_hides_an_attribute_of_the_network_that_is_made_of_it(graph_bundle, tmp_path, name):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))
    rewrite(folder, lambda config: hidden(config, name))
    with pytest.raises(BundleError):
        from_pretrained(folder)


def test_a_part_of_another_name_does_no_harm(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))
    rewrite(folder, lambda config: hidden(config, "harmless"))
    assert from_pretrained(folder)(torch.zeros(2, 3, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize("held", ["_modules", "_parameters", "_buffers"])
def test_what_a_module_holds_is_what_its_attributes_are(held):
    honest = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    refuse_hidden_names(honest)
    odd_names = ("forward", "training", "_\uff3fadd__", "\uff46orward")
    for name, value in (*((name, None) for name in odd_names), ("weight", nn.Parameter(torch.zeros(1)))):
        odd = copy.deepcopy(honest)
        getattr(odd[0], held)[name] = value
        if name == "weight" and held == "_parameters":
            odd[0]._buffers[name] = value
        with pytest.raises(LayerError):
            refuse_hidden_names(odd)
    aliased = copy.deepcopy(honest)
    getattr(aliased[0], held)["part"] = None
    vars(aliased[0])["part"] = torch.zeros(1)
    with pytest.raises(LayerError):
        refuse_hidden_names(aliased)


def test_copies_of_a_loaded_network_are_watched_too(graph_bundle):
    model = from_pretrained(graph_bundle)
    other = copy.copy(model)
    assert isinstance(other, graphs.FoldedModel)
    assert other.guard is model.guard
    assert all(one is same for one, same in zip(other.parameters(), model.parameters(), strict=True))
    assert torch.equal(other(torch.ones(2, 3, 8, 8)), model(torch.ones(2, 3, 8, 8)))


def test_values_that_double_in_each_step_are_refused(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))

    def change(config):
        hidden(config, "harmless")
        steps = config["network"]["graph"]
        out, count = steps.pop(), len(steps)
        steps += [step("call_module", "harmless", [{"step": place}] * 2) for place in range(count - 1, count + 40)]
        steps.append(out)

    rewrite(folder, change)
    with pytest.raises(BundleError):
        from_pretrained(folder)


def test_numbers_are_no_large_formulas_of_the_size_of_the_input(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))
    squares = [step("call_function", "operator.mul", {"step": n}, {"step": n}) for n in range(2, 9)]
    with pytest.raises(BundleError):
        from_pretrained(appended(folder, *BATCH, *squares))


def test_numbers_are_no_formulas_that_double_in_each_step(graph_bundle, tmp_path):
    folder = Path(shutil.copytree(graph_bundle, tmp_path / "b"))
    halves = [
        each
        for n in range(2, 50, 2)
        for each in (
            step("call_function", "operator.floordiv", {"step": n}, 2),
            step("call_function", "operator.add", {"step": n}, {"step": n + 1}),
        )
    ]
    with pytest.raises(BundleError, match="too large a formula"):
        from_pretrained(appended(folder, *BATCH, *halves))


def test_every_argument_by_name_is_a_word():
    assert all(len(name) > 1 or name == "p" for name in allowed.KEYWORDS)
    assert "_stacklevel" in allowed.KEYWORDS
    assert "out" not in allowed.KEYWORDS
