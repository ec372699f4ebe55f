"""The command line as tests call it."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from basisprune.cli import app


def invoke(*words: object) -> Result:
    """What `basisprune` does with these words."""
    return CliRunner().invoke(app, [str(word) for word in words])


def compress_into(folder: Path, photos: Path, *more: object) -> Result:
    """What `basisprune compress` does with the tiny network and these photos."""
    start = ("--model", "tiny:tiny_backbone", "--data", photos, "--size", 16, "--output", folder)
    return invoke("compress", *start, "--val-fraction", "25%", *more)
