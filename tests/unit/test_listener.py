"""Laws of listeners: whatever tells and whatever hears fit together."""

from __future__ import annotations

import inspect

import pytest

from basisprune.cli.common import Teller
from basisprune.listener import Listener, Silence, TrainingStep
from basisprune.training.progress import SearchProgress, TrainingBar

CALLS = [name for name in vars(Listener) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [Silence, SearchProgress, Teller, TrainingBar])
@pytest.mark.parametrize("call", CALLS)
def test_every_listener_takes_every_call(kind, call):
    wanted, found = (inspect.signature(getattr(each, call)) for each in (Listener, kind))
    assert list(found.parameters) == list(wanted.parameters)


def test_silence_says_nothing(capsys):
    silence = Silence()
    silence.say("a line")
    silence.opened(1, 2)
    silence.trained(TrainingStep(0, 2, 1, 4, 0.25, 2.0, 1.0, 8, 0.5, 0.5))
    assert capsys.readouterr() == ("", "")
