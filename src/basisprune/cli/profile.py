"""`basisprune profile`: how long layers take on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import named_network, tell


def profile(
    folder: Annotated[
        Path | None, typer.Argument(help="A prepared folder to measure here; needs onnxruntime and numpy alone.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The file of times to write, such as device.json.")] = None,
    prepare: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the folder to measure on the device instead.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A timm model name, package.module:factory, or a result.")] = None,
    size: Annotated[int | None, typer.Option(help="Image height and width in pixels (default: the model's).")] = None,
    runtime: Annotated[str, typer.Option(help="The runtime that is measured: onnxruntime.")] = "onnxruntime",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the runtime (default: 1, or as the folder was prepared).")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at a time (default: 1).")] = None,
    keep_head: Annotated[bool, typer.Option("--keep-head", help="A model by name keeps its own head.")] = False,
    trust_code: Annotated[bool, typer.Option("--trust-code", help="Run a model's own code.")] = False,
) -> None:
    """Measure how long the layers of a model take on a device, for compress --device.

    On this machine: --model and --output. On another one: --prepare writes a small folder of generated layers with a
    script; copy it there, and run the script with Python, onnxruntime and numpy.

    \b
    Examples:
      basisprune profile --model resnet50 --size 128 --output device.json
      basisprune profile --model resnet50 --size 128 --prepare layers
      python layers/profile_device.py --output device.json    (on the device)
      basisprune profile layers --output device.json          (or like this)
    """
    from basisprune.errors import ConfigError

    faults = [
        message
        for is_wrong, message in (
            (runtime != "onnxruntime", f"--runtime: {runtime!r} given; allowed is onnxruntime"),
            ((folder is None) == (model is None), "a prepared folder or --model is needed, and not both"),
            (None not in (folder, prepare), "--prepare: needs --model, and no folder to measure"),
            ((output is None) == (prepare is None), "--output or --prepare is needed, and not both"),
        )
        if is_wrong
    ]
    faults += [
        f"--{name}: {value} given with a prepared folder, whose layers have theirs; prepare it again with --{name}"
        for name, value in (("size", size), ("batch", batch))
        if folder is not None and value is not None
    ]
    if faults:
        raise ConfigError.of("profile", faults)
    if folder is not None:
        _measure(folder, threads, output)
        return
    setting = threads or 1, batch or 1
    _from_model(model or "", size, setting, prepare, output, keep_head=keep_head, trust_code=trust_code)


def _measure(folder: Path, threads: int | None, output: Path | None) -> None:
    """Measures a prepared folder; nothing here may import torch."""
    from basisprune.deploy import device
    from basisprune.errors import ModelError
    from basisprune.files import write_text

    try:
        table = device.profile(folder, threads=threads, say=tell)
    except device.ProfileError as error:
        raise ModelError(str(error)) from error
    assert output is not None
    write_text(output, json.dumps(table, indent=1) + "\n")
    tell(f"{output}: the times of {len(table['shapes'])} layer shapes; pass it to compress --device")


def _from_model(
    name: str,
    size: int | None,
    setting: tuple[int, int],
    prepare: Path | None,
    output: Path | None,
    *,
    keep_head: bool,
    trust_code: bool,
) -> None:
    from basisprune.deploy.timing import SCRIPT, profile_here, wanted_shapes, write_layer_models
    from basisprune.files import user_path, write_text
    from basisprune.transfer.model import spec_of

    network = named_network(name, size, 10, trust_code, keep_head=keep_head)
    spec = spec_of(network)
    shapes = wanted_shapes(network, spec.shape if size is None else (spec.channels, size, size))
    threads, batch = setting
    if prepare is not None:
        folder = write_layer_models(user_path(prepare, "prepare"), shapes, batch=batch, threads=threads)
        tell(f"{folder}: {len(shapes)} layer shapes; copy it to the device and run there, with onnxruntime and numpy:")
        tell(f"  python {folder.name}/{SCRIPT} --output device.json")
        return
    assert output is not None
    tell(f"measuring {len(shapes)} layer shapes in onnxruntime")
    write_text(output, profile_here(shapes, batch=batch, threads=threads).to_json() + "\n")
    tell(f"{output}: pass it to compress --device")
