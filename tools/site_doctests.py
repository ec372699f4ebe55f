"""For the docs site: the examples in docstrings are shown as code, though their docstrings have no heading for them."""

from __future__ import annotations

from collections.abc import Iterator

import griffe


class Doctests(griffe.Extension):
    """Puts a fence around each example of a docstring, from its `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""The text with a fence around each doctest.

    >>> fenced("One.\n\n>>> 1 + 1\n2\n\nMore.").splitlines()
    ['One.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """
    return "\n".join(_fenced(text.splitlines()))


def _fenced(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if not inside and line.startswith(">>>"):
            inside = True
            yield "```pycon"
        elif inside and not line.strip():
            inside = False
            yield "```"
        yield line
    if inside:
        yield "```"
