"""Laws of listeners: whatever tells and whatever hears fit together."""

from __future__ import annotations

import inspect

import pytest

from basisprune.cli.common import Teller
from basisprune.listener import Listener, Silence
from basisprune.training.progress import SearchProgress

CALLS = [name for name in vars(Listener) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [Silence, SearchProgress, Teller])
@pytest.mark.parametrize("call", CALLS)
def test_every_listener_takes_every_call(kind, call):
    wanted, found = (inspect.signature(getattr(each, call)) for each in (Listener, kind))
    assert list(found.parameters) == list(wanted.parameters)


def test_silence_says_nothing(capsys):
    silence = Silence()
    silence.say("a line")
    silence.trained(3, 0.5, 10)
    assert capsys.readouterr() == ("", "")
