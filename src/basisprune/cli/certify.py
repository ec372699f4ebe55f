"""`basisprune certify`: what labels for images without any certify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import Json, Teller, TrustCode, told_errors
from basisprune.cli.compress import finish


def certify(
    run: Annotated[Path, typer.Argument(help="The output folder of compress --unlabelled.")],
    labels: Annotated[Path, typer.Option(help="A CSV file of file,label, as label.html makes it.", metavar="FILE")],
    _trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Certify the budget of a run by labels for images that had none.

    Only images on which the networks answer differently need a label: out/label.html asks for them, one after the
    other, and says when they are enough. Labels that are missing count against the pruned network, and so does "?"
    for what nobody can tell. Labels once read cannot be changed. Exports of Label Studio can be read too.

    \b
    Examples:
      basisprune compress --model resnet50 --data photos --unlabelled week46 --output out
      basisprune certify out --labels labels.csv

    Exit codes: as those of compress.
    """
    with told_errors():
        from basisprune.runs.compress import certify_run

        result = certify_run(run, labels, callback=Teller())
    finish(result.summary, run, as_json=as_json)
