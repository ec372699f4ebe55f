"""`basisprune export`: a result for another runtime."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import ConfigFile, Json, Teller, TrustCode, show, show_json


def export(
    result: Annotated[Path, typer.Argument(help="An output folder of compress or train, or a model/ folder.")],
    to: Annotated[str, typer.Option(help="The runtime: onnx, openvino, executorch, torch or ncnn.")],
    data: Annotated[
        str | None, typer.Option(help="Labelled images to compare and judge on (default: those of the run).")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Also write an 8-bit file: onnx and openvino.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Another folder for the files (default: that of the run).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")] = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
    _config: ConfigFile = None,
) -> None:
    """Write the model of a result for another runtime, and check it there.

    The output is compared with PyTorch's on images of the run, the accuracy on its test images is measured by the
    runtime itself, and all forms of the model are timed alternately. Report and summary then list them all.

    \b
    Examples:
      basisprune export out --to openvino
      basisprune export out --to openvino --int8
      basisprune export out/model --to executorch --data photos --output phone
    """
    from basisprune.report.text import runtime_table
    from basisprune.runs.export import ExportOptions, export_result

    options = ExportOptions(data, output, int8, overwrite, trust_code)
    rows = export_result(result, to, options, callback=Teller())
    if as_json:
        show_json([asdict(row) for row in rows])
        return
    show(*runtime_table(rows).splitlines())
