"""How a run wants its images read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from basisprune.data.manifest import Manifest
from basisprune.errors import DataError
from basisprune.listener import Listener, Silence

_MOST_SHOWN = 10


@dataclass(frozen=True)
class Reading:
    """What is done about images that are damaged, belong together or were chosen before.

    `groups` is a CSV file of image names and groups: images of one group stay in one part. With `strict`, damaged
    images and images that the data has in several parts are refused; otherwise they are reported and left out. With a
    `manifest`, exactly its images are used. Without a `listener`, reports are Python warnings.
    """

    groups: str | os.PathLike[str] | None = None
    strict: bool = False
    manifest: Manifest | None = None
    listener: Listener | None = None

    @property
    def hearer(self) -> Listener:
        """Who hears of the progress."""
        return self.listener or Silence()

    def report(self, what: str, found: Sequence[str]) -> None:
        """Reports what was found, the first ten by name; raises DataError instead if it is `strict`."""
        if self.strict:
            raise DataError.of(what, found)
        rest = [f"and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
        line = "\n  - ".join([what, *found[:_MOST_SHOWN], *rest])
        if self.listener is not None:
            self.listener.say(line)
        else:
            warnings.warn(line, UserWarning, stacklevel=4)
