"""A page that asks a person for the labels that a certificate lacks: one file, offline, blind and in random order."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from basisprune.budget.looks import UNLIKELY, SequentialTest
from basisprune.files import write_text
from basisprune.report.html import environment

EMBEDDED = 40_000_000
"""The bytes of pictures that a page holds; further ones stay in their files."""
_SIDE, _EXACT = 512, 128  # of the pictures, and of those kept pixel by pixel


@dataclass(frozen=True)
class Question:
    """An image on which networks differ: its place in the random order, and the class that each network names.

    `answers` are of the unpruned network, then of the candidates, the largest first. `picture` opens the image; `path`
    is its file, if it has one.
    """

    name: str
    place: int
    answers: tuple[int, ...]
    picture: Callable[[], Image.Image]
    path: Path | None = None


@dataclass(frozen=True)
class LabelPage:
    """What a page asks, and when the labels are enough; `key` tells the browser the runs apart.

    `labels` were given already, by the name of the image: the name of a class, or "?" for "cannot tell".
    """

    title: str
    key: str
    command: str
    classes: Sequence[str]
    candidates: Sequence[str]
    test: SequentialTest
    questions: Sequence[Question]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, object]:
        """What the script reads."""
        left = EMBEDDED
        items = []
        for each in sorted(self.questions, key=lambda each: each.place):
            source = _embedded(each.picture()) if left > 0 or each.path is None else each.path.resolve().as_uri()
            left -= len(source) if source.startswith("data:") else 0
            items.append({"file": each.name, "place": each.place, "said": each.answers, "source": source})
        test = self.test
        return {
            "key": f"basisprune labels {self.key}",
            "classes": list(self.classes),
            "candidates": list(self.candidates),
            "margin": test.margin,
            "looks": test.looks,
            "unlikely": UNLIKELY,
            "items": items,
            "given": [
                [place, label if label == "?" else list(self.classes).index(label)]
                for place, item in enumerate(items)
                if (label := self.labels.get(str(item["file"]))) is not None
            ],
        }


def write_label_page(page: LabelPage, path: Path) -> Path:
    """Write the page. Raises MissingExtraError without jinja2."""
    write_text(path, environment().get_template("label.html").render(page=page))
    return path


def _embedded(picture: Image.Image) -> str:
    """Return the picture as a data address, made smaller if it is large."""
    shown, written = picture.convert("RGB"), io.BytesIO()
    kind = "png" if max(shown.size) <= _EXACT else "jpeg"
    shown.thumbnail((_SIDE, _SIDE))
    shown.save(written, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(written.getvalue()).decode()}"
