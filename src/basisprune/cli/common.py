"""What the subcommands share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def told_errors() -> Iterator[None]:
    """Errors of basisprune are told in one message with exit code 1, without a traceback; Ctrl-C exits with 130."""
    from basisprune.errors import BasisPruneError

    try:
        yield
    except BasisPruneError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to go on from here", err=True)
        raise typer.Exit(130) from None


def fraction(text: str) -> float:
    """'1%' or '0.01' as a number.

    >>> fraction("1%"), fraction("0.5")
    (0.01, 0.5)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(%?)\s*", text)
    try:
        return float(match[1]) / (100 if match[2] else 1)  # type: ignore[index]
    except (TypeError, ValueError):
        raise typer.BadParameter(f"{text!r} given; write a percentage such as 1% or a fraction such as 0.01") from None


def amount(text: str) -> int:
    """'1.5M', '300k' or '250000' as a number.

    >>> amount("1.5M"), amount("300k")
    (1500000, 300000)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kMG]?)\s*", text)
    try:
        return round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])  # type: ignore[index]
    except (TypeError, ValueError):
        raise typer.BadParameter(f"{text!r} given; write a number such as 250000, 300k or 1.5M") from None
