"""`basisprune inspect`: what a model costs, layer by layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from basisprune.cli.common import ConfigFile, Json, TrustCode, Weights, named_network, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from basisprune.deploy.latency import Latency


def inspect(
    model: Annotated[str, typer.Argument(help="A timm model name, package.module:factory, a result or a bundle.")],
    size: Annotated[int | None, typer.Option(help="Image height and width in pixels (default: the model's).")] = None,
    classes: Annotated[int, typer.Option(help="Number of classes, for a model given by name.")] = 10,
    weights: Weights = None,
    keep_head: Annotated[bool, typer.Option("--keep-head", help="A model by name keeps its own head.")] = False,
    latency: Annotated[bool, typer.Option("--latency", help="Measure the latency on this machine.")] = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
    _config: ConfigFile = None,
) -> None:
    """Show the layers of a model: kind, rank kept of the full rank, parameters, multiply-adds, and latency.

    \b
    Examples:
      basisprune inspect resnet50 --size 128
      basisprune inspect out --latency
      basisprune inspect my_module:network --keep-head --size 64
      basisprune inspect out/model --json
    """
    from basisprune.costs import joined_report
    from basisprune.report import layer_table
    from basisprune.transfer.model import spec_of

    network = named_network(model, size, classes, trust_code, keep_head=keep_head, weights=weights)
    spec = spec_of(network)
    shape = spec.shape if size is None else (spec.channels, size, size)
    report = joined_report(network, shape)
    times = _latency(network, shape) if latency else []
    if as_json:
        show_json(asdict(report) | ({"latency": [asdict(row) for row in times]} if latency else {}))
        return
    show(*layer_table(report).splitlines())
    for row in times:
        each = 1000 * row.seconds / row.batch_size
        show(f"{row.backend}, batch {row.batch_size}: {each:.2f} ms per image, one thread")


def _latency(network: nn.Module, shape: tuple[int, ...]) -> Sequence[Latency]:
    from basisprune.deploy.export.onnx import has_onnx
    from basisprune.deploy.latency import Backend, measure_latency
    from basisprune.runs.summary import rounds

    models = {"model": network}
    backends: tuple[Backend, ...] = ("eager", "onnxruntime") if has_onnx() else ("eager",)
    repeats = rounds(models, shape, images=66, seconds=20)
    return measure_latency(models, shape, repeats=repeats, backends=backends).rows
