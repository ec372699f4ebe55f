"""Configurations, sweeps and run folders as a stranger would write them, and a guard that sees whether code was run.

`all_settings(source)` gives targets for fuzz.py, as `all_targets` does.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from fuzz_targets import ODD, Target, network, spoilt_bytes, spoilt_value
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from basisprune.cli import app
from basisprune.deploy.bundle import save_pretrained
from basisprune.errors import ConfigError
from basisprune.files import digest
from basisprune.runs.parsing import yaml_of

_CANARY = "dire_canary"
_EVENTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn", "shutil.rmtree")
_HARMLESS = ("uname",)  # which Python's own `platform` asks
_seen: list[str] = []
_watching = False
_CODE = (f"{_CANARY}:f", f"{_CANARY}.f:g", "os:system", f"torchvision:{_CANARY}", "torchvision:os", "timm:os", "hf:os")
_TEXTS = (
    *("!!python/object/apply:os.system [id]", "!!python/name:os.system", "&a [*a]", "<<: {a: 1}", "0x7fffffffffffffff"),
    *("1:1:1", "2020-01-01", "010", ".inf", "-.nan", "9" * 5000, "[" * 2000, "{" * 2000, "- " * 500, "? x", "\t"),
    *("'\x1b[2J'", '"\\x1b]0;x\\x07"', '"\\ud800"', '"\\UFFFFFFFF"', "|\n  x", "%YAML 9.9", "---", "..."),
)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    """Notes what a reader of settings must never do; raising here would be caught by whoever imports."""
    if not _watching:
        return
    if event == "import" and str(arguments[0]).startswith(_CANARY):
        _seen.append(f"imported {arguments[0]}")
    elif event in _EVENTS and not any(word in str(arguments[0]) for word in _HARMLESS):
        _seen.append(f"{event} {arguments[0]}")


sys.addaudithook(_audit)


def backbone() -> nn.Module:
    """A network whose name is typed, so that it may be imported."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


class CodeRunError(AssertionError):
    """Code of a stranger was run."""


@contextmanager
def guarded() -> Iterator[None]:
    """Raise CodeRunError if the block imports the canary, starts a program or removes a folder."""
    global _watching
    _seen.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
        if _seen:
            raise CodeRunError("; ".join(_seen[:5]))


def said_by(*words: object) -> str:
    """What a command prints; raises ConfigError for its own errors, and whatever else comes out of it."""
    with guarded():
        done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    odd = {letter for letter in done.output if ord(letter) < 32 and letter != "\n"}
    if odd or "Traceback" in done.output:
        raise AssertionError(f"{odd or 'a traceback'} in the output")
    if done.exit_code not in (0, 3):
        raise ConfigError(done.stderr[:200])
    return done.stdout


def odd_yaml(value: dict[str, object], chance: random.Random) -> bytes:
    """The settings with references to code, odd values, bombs and broken bytes in them."""
    changed = spoilt_value(value, chance)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        if isinstance(changed, dict):
            changed[chance.choice([*value, "trust_code", "ray_address", "<<", "task"])] = chance.choice([*_CODE, *ODD])
    try:
        text = yaml_of(changed) if isinstance(changed, dict) else str(changed)
    except (ValueError, UnicodeError):
        text = str(changed)
    kind = chance.randrange(8)
    lines = text.splitlines()
    if kind == 0 and lines:
        lines[chance.randrange(len(lines))] = f"{chance.choice([*value, 'a'])}: {chance.choice(_TEXTS)}"
    elif kind == 1:
        lines += ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 30)]
    elif kind == 2:
        lines += ["b0: &b0 [x, x]"] + [f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]" for n in range(1, 40)]
    elif kind == 3:
        lines += [f"k{n}: {n}" for n in range(chance.choice((100, 20_000)))]
    content = "\n".join(lines).encode(errors="replace")
    return spoilt_bytes(content, chance) if chance.random() < 0.2 else content


def all_settings(source: Path) -> list[Target]:
    """A configuration, a sweep and the folder of a run; `source` is a folder for sound files."""
    source.mkdir(parents=True, exist_ok=True)
    (source / f"{_CANARY}.py").write_text("raise RuntimeError('code was run')\n")
    if str(source) not in sys.path:
        sys.path.append(str(source))
    data, photo, run = source / "data.npz", source / "photo.png", source / "run"
    pixels = np.random.default_rng(0).integers(0, 255, (36, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(36) % 3
    np.savez(data, x_train=pixels[6:], y_train=labels[6:], x_test=pixels[:6], y_test=labels[:6])
    Image.fromarray(pixels[0]).save(photo)
    save_pretrained(network(), run / "model", classes=["a", "b", "c"])
    options: dict[str, object] = {"max_drop": 0.01, "size": 8, "onnx": False, "recipe": {"train": {"epochs": 1}}}
    config = {"model": f"{_CANARY}:f", "data": str(data), "pretrained": False, **options}
    sweep = {
        "models": [f"{_CANARY}:f"],
        "datasets": [{"data": str(data), "name": "d"}],
        "seeds": [0],
        "options": options,
    }

    def strange(name: str, value: dict[str, object]) -> Callable[[Path, random.Random], None]:
        def spoil(folder: Path, chance: random.Random) -> None:
            (folder / name).write_bytes(odd_yaml(value, chance))

        return spoil

    def strange_run(folder: Path, chance: random.Random) -> None:
        folder = folder / "run"  # which `read_run` removes: the fuzzer removes files alone
        shutil.copytree(run / "model", folder / "model")
        content = odd_yaml(config, chance) + b"\n"
        (folder / "config.yaml").write_bytes(content + f"# sha256 {digest(content)}\n".encode())
        link = chance.choice(("", "", "candidates", ".basisprune-ready", "model/.basisprune-ready", "tests.json"))
        if link:
            (folder / link).symlink_to(source)

    def read_config(folder: Path, *typed: str) -> str:
        words = ("--config", folder / "config.yaml", "--output", folder / "out", "--dry-run")
        return said_by("compress", "--data", data, *typed, *words)

    def read_run(folder: Path) -> str:
        try:
            return said_by("predict", folder / "run", photo)
        finally:
            shutil.rmtree(folder / "run")
            left = {path.name for path in source.iterdir()}
            if not {data.name, photo.name, run.name} <= left:
                raise CodeRunError("files were moved out of another folder")

    return [
        Target("strange configuration", strange("config.yaml", config), read_config),
        Target(
            "strange options",
            strange("config.yaml", options),
            lambda folder: read_config(folder, "--model", f"{Path(__file__).stem}:backbone"),
        ),
        Target(
            "strange sweep",
            strange("sweep.yaml", sweep),
            lambda folder: said_by("sweep", folder / "sweep.yaml", "--output", folder / "out", "--dry-run"),
        ),
        Target("strange run folder", strange_run, read_run),
    ]
