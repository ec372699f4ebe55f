"""A hook of the docs site: count warnings under `--quiet` too, or `--strict --quiet` could never fail."""

from __future__ import annotations

import logging


def on_startup(**_: object) -> None:
    """Let warnings through: `--quiet` hides them from the handler that `--strict` counts with."""
    logger = logging.getLogger("mkdocs")
    logger.setLevel(min(logger.level, logging.WARNING))
