"""Forged bundles: graphs, structures and names of networks that mix what is allowed with what would do harm."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from basisprune.deploy.allowed import CLASSES, FUNCTIONS, KEYWORDS, METHODS
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import BasisPruneError
from basisprune.transfer.model import transfer_model

CODE = "__import__('os').mkdir('basisprune-was-here')"
NAMES = (
    *(
        "forward",
        "__class__",
        "__dict__",
        "__setattr__",
        "_modules",
        "_call_impl",
        "_forward_hooks",
        "training",
        "part",
    ),
    *(
        "forward.__func__.__globals__.get",
        "register_forward_hook",
        "load_state_dict",
        "about",
        "guard",
        "graph",
        "code",
    ),
    *(
        "recompile",
        "_steps",
        "classes",
        "source",
        "layer_names",
        "act_layer",
        "padding_mode",
        "weight",
        "same",
        "answers",
    ),
)
STRANGE = (
    *("builtins.eval", "os.system", "torch.load", "torch.save", "torch.hub.load", "torch.ops.load_library", "getattr"),
    *("operator.methodcaller", "operator.attrgetter", "functional.handle_torch_function", "numpy", "apply_", "tofile"),
    *("__reduce_ex__", "share_memory_", "map_", "register_hook", "storage", "__class__", "eval", "set_", "resize_"),
)
BACKBONES = (
    *("vit_giant_patch14_224", "eva_giant_patch14_560", "resnet18", "hf-hub:timm/resnet18.a1_in1k", "local-dir:/tmp"),
    *(
        "torchvision:fasterrcnn_resnet50_fpn",
        "torchvision:resnet18",
        "os:getcwd",
        "builtins:breakpoint",
        "timm:resnet18",
    ),
    *("antigravity:x", "../../x", "", "resnet18.../../x", "a" * 500),
)
_KINDS = ("graph", "structure", "network")
NUMBERS = (0, 1, -1, 2, 3, 16, 255, 4096, 10**6, 2**31, 10**12, 10**30, 0.5, -1e30, True)


class Several(nn.Module):
    """Does a bit of all that a graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.register_buffer("order", torch.arange(8))

    def forward_features(self, x: Tensor) -> Tensor:
        """Features of the images."""
        x = self.conv(x)[:, self.order] * self.scale
        count, channels = x.shape[0], x.size(1)
        halves = torch.chunk(x, 2, dim=1)
        x = torch.cat([halves[1], halves[0].relu()], 1).view(count, channels, x.shape[2], -1)
        return nn.functional.silu(self.other(x).clamp(min=-2))


def graph_bundle(folder: Path) -> dict[str, bytes]:
    """The files of a sound bundle that holds a graph."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transfer_model(Several(), 3, input_size=8)
    save_pretrained(fold(model, torch.zeros(2, 3, 8, 8)), folder)
    return {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "plans.json")}


def write_sealed(folder: Path, files: dict[str, bytes], config: dict[str, Any]) -> None:
    """Writes the files with checksums that are right."""
    said = {key: value for key, value in config.items() if key != "checksum"}
    said["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name[0] != "c"}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    said["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    for name, content in (files | {"config.json": json.dumps(said).encode()}).items():
        (folder / name).write_bytes(content)


def forged(files: dict[str, bytes], kind: str, chance: random.Random) -> dict[str, Any]:
    """What a config.json says that was forged: its "graph", its "structure", or which "network" is built."""
    config: dict[str, Any] = json.loads(files["config.json"])
    if kind == "graph":
        config["network"]["graph"] = _graph(config["network"]["graph"], chance)
    elif kind == "structure":
        _forge_structure(config["structure"], chance)
    else:
        config["network"] |= {"backbone": chance.choice(BACKBONES), "alone": False, "graph": None}
        config["network"] |= {"insert_norm": chance.choice((None, True)), "traced": chance.random() < 0.5}
        config["structure"] = chance.choice(({}, config["structure"], {"attributes": {chance.choice(NAMES): CODE}}))
    return config


def exploit(part: str) -> list[dict[str, Any]]:
    """Steps that once ran code: attributes of a module were followed as if they were modules in it."""
    return [
        _step("call_module", part, {"step": 0}),
        _step("call_module", f"{part}.forward.__func__.__globals__.get", "__builtins__"),
        _step("call_function", "operator.getitem", {"step": 2}, "eval"),
        _step("call_module", f"{part}.__setattr__", "pwn", {"step": 3}),
        _step("call_module", f"{part}.pwn", CODE),
    ]


def _step(op: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "target": target, "args": list(args), "kwargs": kwargs}


def _graph(steps: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    steps = copy.deepcopy(steps)
    named = {op: [step["target"] for step in steps if step["op"] == op] for op in ("call_module", "get_attr")}
    if chance.random() < 0.1:
        steps = [steps[0], *exploit(chance.choice(named["call_module"])), steps[-1]]
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = len(steps) - 1 if chance.random() < 0.8 else chance.randrange(1, len(steps) - 1)
        new = _any_step(place, named, chance)
        steps[place : place + (place < len(steps) - 1)] = [new]
    if chance.random() < 0.2:
        steps[-1]["args"] = [{"step": len(steps) - 2}]
    return steps


def _any_step(place: int, named: dict[str, list[str]], chance: random.Random) -> dict[str, Any]:
    op = chance.choice(("call_module", "get_attr", "call_function", "call_function", "call_method", "call_method"))
    target = chance.choice((named | {"call_function": [*FUNCTIONS, "getattr"], "call_method": [*METHODS]})[op])
    if op == "get_attr" and chance.random() < 0.9:
        return _step(op, target)
    if chance.random() < 0.1:
        target = chance.choice((*STRANGE, f"{target}.{chance.choice(NAMES)}", chance.choice(NAMES), *named["get_attr"]))
    args = [
        {"step": chance.choice((0, 1, 3, chance.randrange(place)))},
        *(_any_value(place, chance) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))),
    ]
    names = [*sorted(KEYWORDS), "out", "device", "generator", "layout"]
    kwargs = {chance.choice(names): _any_value(place, chance) for _ in range(chance.choice((0, 0, 0, 0, 1, 2)))}
    return {"op": op, "target": target, "args": args[chance.random() < 0.1 :], "kwargs": kwargs}


def _any_value(place: int, chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return {"step": chance.randrange(place)}
    if kind < 4:
        return chance.choice(NUMBERS)
    if kind == 4:
        return chance.choice((*NAMES, "shape", "dtype", "same", "nearest", CODE, None, {"ellipsis": True}))
    items = [_any_value(place, chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 2, 4)))]
    return {"slice": (items * 3 + [None] * 3)[:3]} if kind == 5 else {"tuple": items} if kind == 6 else items


def _forge_structure(node: dict[str, Any], chance: random.Random) -> None:
    """Changes some of the modules in it."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        home, name = node, ""
        while home.get("children") and (not name or chance.random() < 0.6):
            name = chance.choice(sorted(home["children"]))
            inner = home["children"][name]
            if not isinstance(inner, dict) or not inner.get("children"):
                break
            home = inner
        children = home.setdefault("children", {})
        if chance.random() < 0.2:
            name = chance.choice(NAMES)
            home.setdefault("order", [*children]).append(name)
        children[name or "x"] = _any_node(children.get(name) or {}, chance)


def _any_node(node: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    node = dict(node)
    kind = chance.randrange(7)
    if kind < 2:
        name = chance.choice(
            (*CLASSES, *CLASSES, "torch.nn.LSTM", "torch.nn.DataParallel", "os.system", "torch.nn.init")
        )
        known = list(inspect.signature(CLASSES[name]).parameters) if name in CLASSES else ["x"]
        named = (chance.choice([*known, "device", "dtype", chance.choice(NAMES)]) for _ in range(chance.randrange(4)))
        return {"class": name, "args": {each: _plain_value(chance) for each in named}}
    if kind < 4:
        known = [
            *NAMES,
            "kernel_size",
            "groups",
            "stride",
            "out_channels",
            "inplace",
            "p",
            "_reversed_padding_repeated_twice",
        ]
        attributes = {chance.choice(known): _plain_value(chance) for _ in range(3)}
        return node | {"attributes": node.get("attributes", {}) | attributes}
    if kind == 4:
        return {chance.choice(("same", "take")): chance.choice(("", "classifier", "backbone", *NAMES))}
    if kind == 5:
        return node | {"answers": chance.choice(NAMES)}
    return node | {
        chance.choice(("parameters", "buffers")): {chance.choice(NAMES): chance.choice((True, [True, True]))}
    }


def _plain_value(chance: random.Random) -> Any:
    kind = chance.randrange(4)
    if kind < 2:
        return chance.choice(NUMBERS)
    if kind == 2:
        return chance.choice((*NAMES, "relu", "batchnorm2d", "zeros", CODE, None))
    return {"tuple": [chance.choice(NUMBERS) for _ in range(chance.choice((1, 2, 2, 4)))]}


def load_and_run(folder: Path) -> None:
    """Loads a bundle and predicts with it, in batches and sizes that loading did not try."""
    bundle = load_bundle(folder)
    shape = bundle.input_shape
    with torch.no_grad():
        for images in (torch.rand(5, *shape), torch.rand(2, *shape[:-1], 2 * shape[-1])):
            try:
                bundle.model(images)
            except BasisPruneError:
                raise
            except (
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
                AttributeError,
                NotImplementedError,
                AssertionError,
            ):
                return  # a graph for one size may fail at another, as any network may


def forgeries(source: Path) -> list[tuple[str, Callable[[Path, random.Random], None], Callable[[Path], object]]]:
    """Of each kind of forgery its name, what writes one into a folder, and what reads it."""
    files = graph_bundle(source)
    weights = {"none": save({}), "huge": save({"x": torch.zeros(10)})}

    def spoil(folder: Path, chance: random.Random, kind: str) -> None:
        given = dict(files)
        if kind == "network":
            given["model.safetensors"] = weights[chance.choice(sorted(weights))]
        write_sealed(folder, given, forged(files, kind, chance))

    return [(f"bundle: forged {kind}", partial(spoil, kind=kind), load_and_run) for kind in _KINDS]
