"""Laws of callbacks: whatever tells and whatever callback fit together."""

from __future__ import annotations

import inspect

import pytest

from basisprune.callback import Callback, NullCallback, TrainingStep
from basisprune.cli.common import Teller
from basisprune.training.progress import SearchProgress

CALLS = [name for name in vars(Callback) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [NullCallback, SearchProgress, Teller])
@pytest.mark.parametrize("call", CALLS)
def test_every_listener_takes_every_call(kind, call):
    wanted, found = (inspect.signature(getattr(each, call)) for each in (Callback, kind))
    assert list(found.parameters) == list(wanted.parameters)


def test_silence_says_nothing(capsys):
    silence = NullCallback()
    silence.log("a line")
    silence.opened(1, 2)
    silence.trained(TrainingStep(0, 2, 1, 4, 0.25, 2.0, 1.0, 8, 0.5, 0.5))
    assert capsys.readouterr() == ("", "")
