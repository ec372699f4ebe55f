"""What a run keeps in its folder, and what it refuses."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from tables import invented
from tiny import tiny_images, tiny_model
from torch import nn

from basisprune.data import ArrayImages, Loaders, load_data
from basisprune.deploy.timing import Wanted
from basisprune.errors import CheckpointError
from basisprune.files import write_checked
from basisprune.layer_times import LayerShape
from basisprune.method.states import StageStore, fingerprint
from basisprune.planning import plan_basis
from basisprune.recipes import DECOMPOSED, DENSE, POLISHED, Step
from basisprune.tasks import segmentation
from basisprune.types import BasisPlan, InputSpec, LayerScores, Scores

HALF = (DECOMPOSED, Step("basis", 0.5))


def plan(ratio: float = 0.5, values: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)) -> BasisPlan:
    return plan_basis(Scores("taylor", {"conv": LayerScores(values)}), ratio)


def test_steps_of_any_number_have_names_of_their_own(tmp_path):
    folder = StageStore(tmp_path)
    long = (DECOMPOSED, *[Step("basis", 0.5)] * 40)
    keys = ((DECOMPOSED,), (DENSE,), long, (*long, POLISHED), (*long[:-1], Step("basis", 0.25)), (Step("x" * 300),))
    names = {folder.path(steps, ".pt").name for steps in keys}
    assert len(names) == len(keys)
    assert max(map(len, names)) < 255


def test_a_number_is_found_once(tmp_path):
    folder = StageStore(tmp_path)
    assert folder.number((DENSE,), "latency", lambda: 1.5) == 1.5
    assert folder.number((DENSE,), "latency", lambda: 2.5) == 1.5
    assert folder.number((DENSE,), "memory", lambda: 2.5) == 2.5
    assert folder.number((DECOMPOSED,), "latency", lambda: 2.5) == 2.5
    assert StageStore(tmp_path).number((DENSE,), "latency", lambda: 2.5) == 1.5


def test_times_are_measured_once(tmp_path):
    folder = StageStore(tmp_path)
    shapes = {LayerShape("conv", (1, 1), (1, 1), (8, 8)): Wanted(8, 8)}
    first = folder.times(lambda: invented(shapes))
    assert first == invented(shapes)
    assert StageStore(tmp_path).times(lambda: invented(shapes, pair_penalty=1.0)) == first
    assert StageStore(None).times(lambda: invented(shapes, pair_penalty=1.0)) != first
    write_checked(tmp_path / "times.json", b"{}")
    with pytest.raises(CheckpointError, match=r"(?s)times\.json: cannot be read.*delete it to measure again"):
        folder.times(lambda: first)


def test_a_plan_is_made_once(tmp_path):
    folder, first = StageStore(tmp_path), plan()
    assert folder.plan(HALF, first) == first
    assert folder.plan(HALF, plan(values=(4.0, 3.0, 2.0, 1.0))) == first


def test_a_plan_for_another_ratio_is_refused(tmp_path):
    folder = StageStore(tmp_path)
    folder.plan(HALF, plan())
    with pytest.raises(CheckpointError, match=r"was created for ratio 0\.5"):
        folder.plan(HALF, plan(0.25))


def test_a_file_that_says_something_else_is_refused(tmp_path):
    folder = StageStore(tmp_path)
    write_checked(folder.path(HALF, ".plan.json"), b"{}")
    with pytest.raises(CheckpointError, match=r"(?s)cannot be read.*delete it to plan again"):
        folder.plan(HALF, plan())
    write_checked(folder.path(HALF, ".latency.json"), b'"fast"')
    with pytest.raises(CheckpointError, match="does not hold a number"):
        folder.number(HALF, "latency", lambda: 1.0)
    write_checked(tmp_path / "run.json", b"\xff")
    with pytest.raises(CheckpointError, match=r"run\.json: cannot be read"):
        folder.claim({"basis": "outputs"})


@pytest.mark.parametrize("bit", range(8))
def test_a_damaged_file_is_set_aside_and_made_again(tmp_path, bit):
    said: list[str] = []
    folder = StageStore(tmp_path, said.append)
    files = [folder.path(HALF, ".plan.json"), folder.path(HALF, ".latency.json"), tmp_path / "run.json"]

    def fill() -> tuple[object, ...]:
        folder.claim({"basis": "outputs"})
        return folder.plan(HALF, plan()), folder.number(HALF, "latency", lambda: 1.5)

    before = fill()
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1 << bit
        file.write_bytes(content)
    assert fill() == before
    assert len(said) == len(files)
    for file, line in zip(sorted(files), sorted(said), strict=True):
        assert file.with_name(f"{file.name}.damaged").exists()
        assert line.startswith(str(file))


def test_a_folder_belongs_to_one_run(tmp_path):
    folder = StageStore(tmp_path)
    folder.claim({"basis": "outputs"})
    folder.claim({"basis": "outputs"})
    folder.claim({"basis": "outputs"})


def test_a_folder_of_other_settings_says_only_what_differs(tmp_path):
    folder = StageStore(tmp_path)
    folder.claim({"basis": "outputs", "classes": ["a", "b"], "input": {"size": (8, 8)}})
    with pytest.raises(CheckpointError, match="was created with other settings") as error:
        folder.claim({"basis": "weights", "classes": ["a", "b"], "input": {"size": (16, 16)}})
    assert error.value.faults == (
        "basis: 'outputs' there, 'weights' now",
        "input.size: [8, 8] there, [16, 16] now",
    )


def test_without_a_root_nothing_is_kept():
    folder = StageStore(None)
    folder.claim({"basis": "outputs"})
    assert folder.path((DENSE,), ".pt") is None
    assert [folder.number((DENSE,), "latency", lambda n=n: n) for n in (1.0, 2.0)] == [1.0, 2.0]
    assert folder.plan(HALF, plan(0.25)) == plan(0.25)


def test_a_fingerprint_tells_every_image_apart():
    images = tiny_images(90)
    pixels = images.images.permute(0, 2, 3, 1).numpy().copy()
    same = ArrayImages(pixels, images.labels)
    expected = fingerprint(tiny_model(), load_data(images))
    assert fingerprint(tiny_model(), load_data(same)) == expected
    assert fingerprint(tiny_model(), load_data(images, seed=1)) != expected
    pixels[45, 0, 0, 0] ^= 1
    assert fingerprint(tiny_model(), load_data(ArrayImages(pixels, images.labels))) != expected


def test_a_fingerprint_tells_the_head_of_a_network_of_ones_own_apart():
    model, other = (
        nn.Sequential(OrderedDict(body=nn.Conv2d(3, 3, 1), classifier=nn.Conv2d(3, 2, 1))) for _ in range(2)
    )
    other.body.load_state_dict(model.body.state_dict())
    for each in (model, other):
        each.input_spec = InputSpec.as_it_is((3, 16, 16))
    images = load_data(tiny_images(30))
    assert fingerprint(model, images)["weights"] != fingerprint(other, images)["weights"]
    drawn = tiny_model()
    nn.init.zeros_(drawn.classifier.weight)  # which is new at each start
    assert fingerprint(drawn, images) == fingerprint(tiny_model(), images)


def test_a_fingerprint_tells_targets_apart_and_not_the_size_of_batches():
    def targets(masks: torch.Tensor, size: int) -> object:
        part = list(zip(torch.arange(4.0).view(4, 1, 1, 1).split(size), masks.split(size), strict=True))
        splits = Loaders(train=[(torch.ones(1, 1, 1, 1), masks[:1])], val=part).splits(segmentation())
        model = nn.Conv2d(1, 2, 1)
        model.input_spec = InputSpec.as_it_is((1, 1, 1))
        return fingerprint(model, splits)["targets"]

    masks = torch.zeros(4, 1, 1).long()
    assert targets(masks, 1) == targets(masks, 4) != targets(1 - masks, 4)
