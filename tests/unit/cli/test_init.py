"""Laws of the command line as a whole: its help, its version and what it answers to typos."""

from __future__ import annotations

import re

import pytest
from commands import invoke

import basisprune
import basisprune.demo

COMMANDS = ("compress", "train", "evaluate", "predict", "inspect", "demo")


def test_help_names_every_command_and_the_exit_codes():
    for words in (("--help",), ()):
        shown = invoke(*words).output
        assert all(command in shown for command in COMMANDS)
        assert "130" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_teaches_by_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert len(re.findall(r"^ +basisprune \w+ ?", result.output, re.MULTILINE)) >= 2


def test_the_version_is_shown():
    result = invoke("--version")
    assert (result.exit_code, result.output.strip()) == (0, basisprune.__version__)


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("comprss",), 2, "Did you mean 'compress'"),
        (("inspect", "resnet18", "--szie", 3), 2, "--size"),
        (("inspect", "rsnet18"), 1, "Did you mean 'resnet18'"),
        (("compress", "--model", "x", "--data", "torchvision:CIFAR1", "--output", "x"), 1, "Did you mean 'CIFAR10'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--recipe", "quik"), 1, "Did you mean 'quick'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--framework", "taylr"), 1, "'taylor'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--max-drop", "much"), 2, "a percentage such as"),
        (("compress", "--model", "x", "--data", "nowhere", "--output", "x"), 1, "nowhere: there is no such file"),
        (("evaluate", "nowhere"), 1, "nowhere: does not exist"),
        (("predict", "nowhere", "image.jpg"), 1, "nowhere: does not exist"),
    ],
)
def test_a_typo_is_answered_with_what_is_allowed(words, code, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == code, result.output
    assert hint in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []
