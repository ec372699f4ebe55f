"""`basisprune certify`: what labels for images without any certify."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import NOT_KEPT, Json, Teller, TrustCode, show, show_json
from basisprune.cli.compress import finish


def certify(
    run: Annotated[Path, typer.Argument(help="The output folder of compress.")],
    labels: Annotated[
        Path | None, typer.Option(help="A CSV file of file,label, as label.html makes it.", metavar="FILE")
    ] = None,
    unlabelled: Annotated[
        str | None, typer.Option(help="New images, to see whether the promise still holds on them.", metavar="SOURCE")
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Certify a budget by labels for images that had none, or check it on new images.

    Only images on which the networks answer differently need a label: out/label.html asks for them, one after the
    other, and says when they are enough. Labels that are missing count against the pruned network, and so does "?"
    for what cannot be told. Labels once read cannot be changed. Exports of Label Studio can be read too.

    With --unlabelled, new images show whether the answers differ more often than when the budget was confirmed, which
    needs no labels; out/checks/ then has a page that asks for those that would certify the budget on the new images.

    \b
    Examples:
      basisprune compress --model resnet50 --data photos --output out \\
          --unlabelled week46
      basisprune certify out --labels labels.csv
      basisprune certify out --unlabelled week47

    Exit codes: those of compress; with --unlabelled, 3 if the answers differ more often, or labels speak against the
    pruned network.
    """
    if labels is None and unlabelled is None:
        raise typer.BadParameter("pass --labels, --unlabelled or both")
    if unlabelled is None and labels is not None:
        from basisprune.runs.compress import certify_run

        result = certify_run(run, labels, trust_code=trust_code, callback=Teller())
        finish(result.summary, run, as_json=as_json)
        return
    from basisprune.runs.monitoring import check_run

    check = check_run(run, str(unlabelled), labels, trust_code=trust_code, callback=Teller())
    if as_json:
        show_json({**asdict(check), "folder": str(check.folder), "verdict": check.verdict})
    else:
        show(*check.verdict.splitlines())
    if check.has_drifted or (check.certificate.tests and not check.certificate.certified):
        raise typer.Exit(NOT_KEPT)
