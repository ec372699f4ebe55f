"""`basisprune predict`: classes and probabilities for images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from basisprune.cli.common import FAILED, ConfigFile, Json, TrustCode, show, show_json, tell

if TYPE_CHECKING:
    from basisprune.runs.finished import Answer


def predict(
    result: Annotated[
        Path, typer.Argument(help="An output folder of compress or train, a model/ folder, or an .onnx or .xml file.")
    ],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of images.")],
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print per image.")] = 1,
    trust_code: TrustCode = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout: file, class, probability.")] = False,
    _config: ConfigFile = None,
) -> None:
    """Print the class of each image and its probability.

    Images that cannot be read are reported on stderr; the others are still classified, and the exit code is 1.

    \b
    Examples:
      basisprune predict out cat.jpg
      basisprune predict out new-photos --csv > classes.csv
      basisprune predict out/model.onnx cat.jpg dog.jpg --top 3 --json
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv are mutually exclusive; pass only one")
    from basisprune.report.text import csv_table
    from basisprune.runs.finished import classify_files, image_files, load_any

    answers = list(classify_files(load_any(result, trust_remote_code=trust_code), image_files(images), top))
    bad = [answer for answer in answers if answer.error]
    for answer in bad:
        tell(f"error: {answer.error}")
    good = [answer for answer in answers if not answer.error]
    if as_json:
        show_json([_as_dict(answer) for answer in answers])
    elif as_csv:
        rows = [(str(answer.file), name, share) for answer in good for name, share in answer.classes]
        typer.echo(csv_table(("file", "class", "probability"), rows), nl=False)
    else:
        for answer in good:
            named = ", ".join(f"{name} {share:.1%}" for name, share in answer.classes)
            show(f"{answer.file}: {named}")
    if bad:
        raise typer.Exit(FAILED)


def _as_dict(answer: Answer) -> dict[str, Any]:
    if answer.error:
        return {"file": str(answer.file), "error": answer.error}
    name, share = answer.classes[0]
    return {"file": str(answer.file), "class": name, "probability": share, "classes": dict(answer.classes)}
