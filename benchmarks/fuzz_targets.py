"""Every kind of file that is read, how it is spoilt, and what reads it; for fuzz.py."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from fuzz_graphs import forgeries
from PIL import Image
from safetensors.torch import save
from torch import nn

from basisprune.budget.certify import Test
from basisprune.data import load_data
from basisprune.data.decode import FORMATS, decode
from basisprune.data.manifest import Entry, Manifest, read_manifest
from basisprune.data.split import read_groups
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.errors import BasisPruneError
from basisprune.files import digest, sealed, write_checked
from basisprune.method.states import StageStore
from basisprune.recipes import DENSE
from basisprune.results import RunSummary
from basisprune.runs.folder import settings_of
from basisprune.runs.parsing import read_settings
from basisprune.runs.record import TESTS, FileTest, Tested, read_tested
from basisprune.runs.settings import configure
from basisprune.training.checkpoint import Past, load_checkpoint, save_checkpoint
from basisprune.training.config import TrainConfig
from basisprune.transfer.checkpoints import load_weights
from basisprune.transfer.model import transfer_model
from basisprune.types import BasisPlan, LayerPlan

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, "", "a", "0", "..", "/etc/passwd", "\x00"),
    *("x" * 5000, 'a" if x else "b', "os:system", "__class__", "é", [], {}, [[]], [0] * 1000, {"a": {"b": {}}}),
)


@dataclass(frozen=True)
class Target:
    """A kind of file: `spoil` writes a changed one into a folder, and `read` reads it from there."""

    name: str
    spoil: Callable[[Path, random.Random], None]
    read: Callable[[Path], object]

    @property
    def is_watched(self) -> bool:
        """Whether reading it may do nothing but read: no code, no connection, no file."""
        return self.name.startswith("bundle")


# ------------------------------------------------------------------------------------------------- how to spoil


def spoilt_bytes(content: bytes, chance: random.Random) -> bytes:
    """The bytes with a few changes: bits turned over, pieces gone, doubled or replaced, the end cut off."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place, length = chance.randrange(len(data) + 1), chance.choice((1, 2, 4, 8, 100))
        kind = chance.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = data[place : place + length]
        elif kind == 3:
            data[place : place + length] = chance.choice((b"\xff", b"\x00", b"\x7f", b"9")) * length
        elif kind == 4:
            data[place:place] = chance.randbytes(length)
        elif chance.random() < 0.2:
            del data[place:]
    return bytes(data)


def spoilt_value(value: Any, chance: random.Random) -> Any:
    """JSON values with a few of them replaced, gone, doubled or under another name."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(chance.choice(ODD))
        home, key = chance.choice(places)
        kind = chance.randrange(5)
        if kind < 3:
            other = chance.choice(places)
            home[key] = copy.deepcopy(chance.choice(ODD) if kind else other[0][other[1]])
        elif kind == 3:
            del home[key]
        elif isinstance(home, dict):
            home[str(chance.choice(ODD))[:200]] = home.pop(key)
        else:
            home.insert(key, home[key])
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def spoilt_text(value: Any, chance: random.Random) -> bytes:
    """JSON text that says something odd, or that is none."""
    text = json.dumps(spoilt_value(value, chance)).encode()
    kind = chance.randrange(12)
    if kind == 0:
        return b"[" * chance.choice((10, 1000, 100_000)) + text
    if kind == 1:
        return text.replace(b"0", b"1e999", 1)
    if kind == 2:
        return text.replace(b"1", b"9" * 6000, 1)
    if kind == 3:
        return text.replace(b"0", b"NaN", 1)
    return spoilt_bytes(text, chance) if kind == 4 else text


# ------------------------------------------------------------------------------------------------- what to spoil


def network() -> nn.Module:
    """A network so small that reading it takes no time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        return transfer_model(body, 3, input_size=8)


def bundles(source: Path) -> list[Target]:
    save_pretrained(network(), source, classes=["a", "b", "c"], metrics={"accuracy": 0.5}, plans=[PLAN])
    files = {name: (source / name).read_bytes() for name in ("config.json", "model.safetensors", "plans.json")}
    config = json.loads(files["config.json"])

    def write(folder: Path, changed: dict[str, bytes]) -> None:
        for name, content in (files | changed).items():
            (folder / name).write_bytes(content)

    def resealed(folder: Path, changed: dict[str, bytes], said: Any) -> None:
        """Writes the files with checksums that are right."""
        if isinstance(said, dict):
            said = {key: value for key, value in said.items() if key != "checksum"}
            if isinstance(said.get("files"), dict):
                sums = {name: hashlib.sha256((files | changed)[name]).hexdigest() for name in files}
                said["files"] = {name: sums[name] for name in ("model.safetensors", "plans.json")}
            text = json.dumps(said, sort_keys=True, separators=(",", ":"))
            said["checksum"] = hashlib.sha256(text.encode()).hexdigest()
        write(folder, {**changed, "config.json": json.dumps(said).encode()})

    def spoil_config(folder: Path, chance: random.Random) -> None:
        resealed(folder, {}, spoilt_value(config, chance))

    def spoil_tensors(folder: Path, chance: random.Random) -> None:
        content = files["model.safetensors"]
        size = int.from_bytes(content[:8], "little")
        header = spoilt_text(json.loads(content[8 : 8 + size]), chance)
        length = chance.choice((len(header), len(header), len(header), chance.randrange(2**63)))
        changed = length.to_bytes(8, "little") + header + content[8 + size :]
        changed = spoilt_bytes(content, chance) if chance.random() < 0.3 else changed
        resealed(folder, {"model.safetensors": changed}, config)

    def spoil_plans(folder: Path, chance: random.Random) -> None:
        resealed(folder, {"plans.json": spoilt_text(json.loads(files["plans.json"]), chance)}, config)

    def spoil_bytes(folder: Path, chance: random.Random) -> None:
        name = chance.choice(sorted(files))
        write(folder, {name: spoilt_bytes(files[name], chance)})

    return [
        Target("bundle: what config.json says", spoil_config, load_bundle),
        Target("bundle: tensors", spoil_tensors, load_bundle),
        Target("bundle: plans", spoil_plans, load_bundle),
        Target("bundle: bytes of any file", spoil_bytes, load_bundle),
    ]


PLAN = BasisPlan({"conv": LayerPlan((0, 2), 4)}, pruning_ratio=0.5)


def runs(source: Path) -> list[Target]:
    store = StageStore(source)
    model, config = nn.Linear(3, 2), TrainConfig(epochs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(source / "state.pt", model, optimizer, config, Past())
    state = (source / "state.pt").read_bytes()[:-73]
    plan = store.path((DENSE,), ".plan.json")
    assert plan is not None

    def spoil_stage(folder: Path, chance: random.Random) -> None:
        write_checked(folder / plan.name, spoilt_text(json.loads(PLAN.to_json()), chance))
        write_checked(folder / "dense.latency.json", spoilt_text(1.5, chance))
        write_checked(folder / "run.json", spoilt_text({"basis": "loss", "input": {"size": [8, 8]}}, chance))

    def read_stage(folder: Path) -> None:
        found = StageStore(folder, lambda _line: None)
        for work in (
            lambda: found.plan((DENSE,), PLAN),
            lambda: found.number((DENSE,), "latency", lambda: 1.0),
            lambda: found.claim({"basis": "loss", "input": {"size": [8, 8]}}),
        ):
            with contextlib.suppress(BasisPruneError):
                work()

    def spoil_state(folder: Path, chance: random.Random) -> None:
        write_checked(folder / "state.pt", spoilt_bytes(state, chance))

    def read_state(folder: Path) -> object:
        return load_checkpoint(folder / "state.pt", model, optimizer, config)

    return [
        Target("run: plans, latencies, run.json", spoil_stage, read_stage),
        Target("run: checkpoints", spoil_state, read_state),
    ]


def summaries() -> list[Target]:
    """The summary of a run with one candidate."""
    side = {"accuracy": 0.5, "interval": [0.25, 0.75], "parameters": 100, "macs": 1000}
    row = side | {"steps": [{"name": "dense"}], "basis_ratio": 0.0, "filter_ratio": 0.0, "history": []}
    row |= {"drop": 0.0, "drop_interval": [0.0, 0.0], "passed": True, "undecided": False, "name": "a", "chosen": True}
    texts = dict.fromkeys(("title", "command", "device", "created", "verdict"), "a")
    rest = {"config": {"seed": 0}, "seed": 0, "versions": {}, "budget": {"kind": "max_drop", "value": 0.01}}
    lists = {"classes": ["a"], "reference": side, "candidates": [row], "layers": []}
    values = RunSummary.from_json(json.dumps(texts | rest | lists)).as_dict()

    def spoil(folder: Path, chance: random.Random) -> None:
        text = spoilt_text(values, chance)
        with contextlib.suppress(ValueError, AttributeError, RecursionError, TypeError):
            text = sealed(text.decode()).encode()
        (folder / "summary.json").write_bytes(text)

    return [Target("run: summary.json", spoil, lambda folder: RunSummary.read(folder / "summary.json"))]


def settings() -> list[Target]:
    usual = {"max_drop": 0.01, "epochs": 3, "seed": 1, "recipe": {"base": "quick", "train": {"lr": 0.1}}, "search": {}}

    def spoil(folder: Path, chance: random.Random) -> None:
        text = yaml.safe_dump(spoilt_value(usual, chance), allow_unicode=True).encode()
        if chance.random() < 0.2:
            text += b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 121))
        (folder / "config.yaml").write_bytes(spoilt_bytes(text, chance) if chance.random() < 0.6 else text)

    def read(folder: Path) -> object:
        return configure(read_settings(folder / "config.yaml"))  # type: ignore[arg-type]

    return [Target("settings", spoil, read)]


def images() -> list[Target]:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 11, 3), dtype=np.uint8))
    kinds = {}
    for kind in FORMATS:
        content = io.BytesIO()
        picture.save(content, kind)
        kinds[kind] = content.getvalue()
    arrays = io.BytesIO()
    parts = ("train", "test")
    labels, draw = np.arange(12) % 3, np.random.default_rng(1)
    pixels = {f"x_{part}": draw.integers(0, 255, (12, 4, 4, 3), dtype=np.uint8) for part in parts}
    np.savez(arrays, **pixels, **{f"y_{part}": labels for part in parts})  # type: ignore[arg-type]
    whole = arrays.getvalue()

    def spoil_image(folder: Path, chance: random.Random) -> None:
        (folder / "image.jpg").write_bytes(spoilt_bytes(kinds[chance.choice(FORMATS)], chance))

    def spoil_npz(folder: Path, chance: random.Random) -> None:
        data = spoilt_bytes(whole, chance)
        if chance.random() < 0.4:  # what its arrays say of themselves, of the same length
            shape = f"({chance.choice((0, 1, 12, 10**9)):>2}, {chance.choice((4, 10**9))}, 4, 3), }}".encode()
            data = whole.replace(b"(12, 4, 4, 3), }".ljust(len(shape)), shape)
        (folder / "data.npz").write_bytes(data)

    return [
        Target("images", spoil_image, lambda folder: decode(folder / "image.jpg", (8, 8))),
        Target("npz", spoil_npz, lambda folder: load_data(folder / "data.npz")),
    ]


def onnx_files(source: Path) -> list[Target]:
    """What an ONNX file says of itself; no targets without the packages."""
    try:
        import onnx

        from basisprune.deploy.export import export_onnx
        from basisprune.deploy.export.sandboxed import PREFIX
        from basisprune.runs.finished import load_any
    except ImportError:
        return []
    export_onnx(network(), source / "model.onnx", classes=["a", "b", "c"], preprocess=True)
    content = (source / "model.onnx").read_bytes()

    def spoil(folder: Path, chance: random.Random) -> None:
        proto = onnx.load_from_string(content)
        entry = chance.choice([each for each in proto.metadata_props if each.key.startswith(PREFIX)])
        entry.value = spoilt_text(json.loads(entry.value), chance).decode(errors="replace")
        (folder / "odd.onnx").write_bytes(proto.SerializeToString())

    return [Target("onnx: metadata", spoil, lambda folder: load_any(folder / "odd.onnx"))]


def lists() -> list[Target]:
    """What else a run or its user writes: the run's settings and its list of images, groups, and weights."""
    entries = tuple(Entry(f"{name}/{index}.png", label, "") for label, name in enumerate("ab") for index in range(3))
    sound = json.loads(Manifest(("a", "b"), {"train": entries, "val": entries[:2]}).to_json())
    usual: dict[str, object] = {"seed": 0, "model": "x", "recipe": {"base": "quick"}, "versions": {"torch": "2"}}
    state = {name: tensor.clone() for name, tensor in network().state_dict().items()}
    pickled = io.BytesIO()
    torch.save(state, pickled)
    weights = {".safetensors": save(state), ".pt": pickled.getvalue()}

    def spoil_images(folder: Path, chance: random.Random) -> None:
        text = spoilt_text(sound, chance)
        with contextlib.suppress(ValueError, AttributeError, RecursionError, TypeError):  # by one who knows its hash
            text = sealed(text.decode()).encode()
        (folder / "images.json").write_bytes(text)

    test = Test(0, "y", 0.9, 0.8, 0.1, 0.01, 3, 2, passed=True)
    tested = json.loads(
        Tested("1 %", "x", ("y", "z"), "PyTorch", (test,), ("",), {"a.onnx": FileTest("0", test)}).to_json()
    )

    def spoil_tests(folder: Path, chance: random.Random) -> None:
        write_checked(folder / TESTS, spoilt_text(tested, chance))

    def spoil_config(folder: Path, chance: random.Random) -> None:
        text = yaml.safe_dump(spoilt_value(usual, chance), allow_unicode=True).encode()
        text = spoilt_bytes(text, chance) if chance.random() < 0.5 else text
        (folder / "config.yaml").write_bytes(text + f"# sha256 {digest(text)}\n".encode())

    def spoil_groups(folder: Path, chance: random.Random) -> None:
        text = "file,group\n" + "".join(f'"a/{index}.png",{index // 2}\n' for index in range(6))
        (folder / "groups.csv").write_bytes(spoilt_bytes(text.encode(), chance))

    def spoil_weights(folder: Path, chance: random.Random) -> None:
        suffix = chance.choice(sorted(weights))
        (folder / f"weights{suffix}").write_bytes(spoilt_bytes(weights[suffix], chance))

    def read_weights(folder: Path) -> None:
        load_weights(network(), next(folder.iterdir()))

    return [
        Target("run: images.json", spoil_images, lambda folder: read_manifest(folder / "images.json")),
        Target("run: tests.json", spoil_tests, read_tested),
        Target("run: config.yaml", spoil_config, settings_of),
        Target("groups", spoil_groups, lambda folder: read_groups(folder / "groups.csv")),
        Target("weights", spoil_weights, read_weights),
    ]


def checkpoints() -> list[Target]:
    """A folder of Hugging Face: shards, their index, and what is said of images and classes."""
    names = sorted(state := {name: tensor.clone() for name, tensor in network().state_dict().items()})
    shards = {f"model-{n}.safetensors": save({name: state[name] for name in names[n::2]}) for n in (0, 1)}
    places = {name: f"model-{n}.safetensors" for n in (0, 1) for name in names[n::2]}
    said: dict[str, Any] = {
        "model.safetensors.index.json": {"metadata": {"total_size": 9}, "weight_map": places},
        "config.json": {"id2label": {"0": "a", "1": "b", "2": "c"}, "pretrained_cfg": {"mean": [0.5], "std": [0.5]}},
        "preprocessor_config.json": {"image_mean": [0.5], "image_std": [0.5], "size": {"height": 8, "width": 8}},
    }

    def spoil(folder: Path, chance: random.Random) -> None:
        files = {**shards, **{name: json.dumps(value).encode() for name, value in said.items()}}
        chosen = chance.choice(sorted(files))
        if chosen in said and chance.random() < 0.8:
            files[chosen] = spoilt_text(said[chosen], chance)
        else:
            files[chosen] = spoilt_bytes(files[chosen], chance)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    def read(folder: Path) -> None:
        load_weights(network(), folder).hints.spec(3)

    return [Target("checkpoint folder", spoil, read)]


def all_targets(source: Path) -> list[Target]:
    """Every kind of file that is read; `source` is a folder for sound ones."""
    return [
        *bundles(source / "bundle"),
        *(Target(*each) for each in forgeries(source / "graph")),
        *runs(source),
        *summaries(),
        *settings(),
        *images(),
        *onnx_files(source),
        *lists(),
        *checkpoints(),
    ]
