"""One call from images to the smallest model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_images, tiny_model, tiny_training

from basisprune.compress import compress
from basisprune.config import RECIPES, Recipe
from basisprune.data import Splits, load_data
from basisprune.measure import measure
from basisprune.predict import predict
from basisprune.search import Budget, SearchConfig

pytestmark = pytest.mark.usefixtures("one_thread")
TESTS = Path(__file__).parent.parent


def recipe() -> Recipe:
    training = tiny_training(epochs=2)
    return replace(RECIPES["quick"], train=training, finetune=training)


def data() -> Splits:
    return load_data(tiny_images(120), val_fraction=0.25, test_fraction=0.25)


def run(output: Path | None = None):
    return compress(
        tiny_model(), data(), max_drop=0.02, recipe=recipe(), search=SearchConfig(tolerance=0.2), output=output
    )


def test_the_result_is_within_the_budget_and_its_numbers_are_those_of_the_model():
    result = run()
    assert result.chosen.passed
    assert result.chosen in result.history
    assert result.history[0].accuracy - result.chosen.accuracy <= 0.02 + 1e-9
    report = measure(result.model)
    assert (result.chosen.parameters, result.chosen.macs) == (report.parameters, report.macs)
    assert result.history[0].parameters == measure(tiny_model()).parameters
    assert result.chosen.parameters < result.history[0].parameters


def test_the_summary_survives_json_and_tells_what_happened():
    result = run()
    summary = json.loads(json.dumps(result.summary))
    assert [c["name"] for c in summary["candidates"]] == [c.name for c in result.history]
    assert [c["chosen"] for c in summary["candidates"]].count(True) == 1
    after = predict(result.model, data().test)
    assert summary["test"]["after"]["accuracy"] == pytest.approx(float(after.hits.mean()))
    assert summary["confusion"]["after"] == after.confusion(3)
    assert "removed" in summary["verdict"]


def test_the_folder_holds_summary_and_report_and_a_second_start_changes_nothing(tmp_path):
    first = run(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["verdict"] == first.summary["verdict"]
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    again = run(tmp_path / "out")
    assert again.history == first.history
    for key, value in first.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[key])


def test_sizes_are_budgets_too():
    result = compress(
        tiny_model(), data(), Budget(target_params=700), recipe=recipe(), search=SearchConfig(tolerance=0.2)
    )
    assert measure(result.model).parameters <= 700


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    from pipeline.test_compress import run
    from pathlib import Path
    result = run(Path(sys.argv[1]))
    torch.save(result.model.state_dict(), sys.argv[1] + ".pt")
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    script = textwrap.dedent(SCRIPT.format(tests=str(TESTS)))
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stderr=subprocess.PIPE)


def test_a_search_that_is_killed_again_and_again_ends_with_the_same_answer(tmp_path):
    expected = run(tmp_path / "whole")
    chance = random.Random(0)
    for _ in range(5):
        process = start(tmp_path / "killed")
        wanted = len(list((tmp_path / "killed").rglob("*.pt"))) + 1
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(list((tmp_path / "killed").rglob("*.pt"))) >= wanted:
                time.sleep(chance.uniform(0, 0.05))
                break
            time.sleep(0.005)
        process.kill()
        process.communicate()
    final = start(tmp_path / "killed")
    _, errors = final.communicate(timeout=120)
    assert final.returncode == 0, errors.decode()
    state = torch.load(tmp_path / "killed.pt", weights_only=True)
    assert state.keys() == expected.model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in expected.model.state_dict().items())
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed")]
    assert summaries[0]["candidates"] == summaries[1]["candidates"]
