"""Networks of more than one input: batches with tuples and dicts of tensors, from scores to a bundle and ONNX."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from tiny import tiny_recipe, tiny_training
from torch import Tensor, nn

import basisprune as bp
from basisprune.data import Loaders
from basisprune.errors import DataError
from basisprune.search import SearchConfig
from basisprune.torchkit.running import packed
from basisprune.transfer.several import SeveralInputs

pytestmark = pytest.mark.usefixtures("one_thread")


class Masked(nn.Module):
    """Classifies what a mask leaves of an image, at a step: three inputs of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.step = nn.Linear(1, 24)
        self.head = nn.Linear(24, 3)

    def forward(self, image: Tensor, mask: Tensor, step: Tensor) -> Tensor:
        x = self.body(self.stem(image)) + self.step(step.float()[:, None] / 10)[:, :, None, None]
        return self.head(x.masked_fill(~mask[:, None], 0.0).mean((2, 3)))


def batches(seed: int, named: bool) -> list[tuple[object, Tensor]]:
    generator, labels = torch.Generator().manual_seed(seed), torch.arange(12) % 3
    found = []
    for _ in range(3):
        image = 0.3 * torch.randn(12, 3, 8, 8, generator=generator)
        image[torch.arange(12), labels] += 1
        mask, step = torch.rand(12, 8, 8, generator=generator) < 0.7, torch.randint(0, 9, (12,), generator=generator)
        parts = {"image": image, "mask": mask, "step": step}
        found.append((parts if named else tuple(parts.values()), labels))
    return found


@pytest.mark.parametrize("named", [False, True])
def test_a_network_of_three_inputs_becomes_smaller_down_to_its_files(tmp_path, named):
    torch.manual_seed(0)
    network = Masked()
    data = Loaders(**{part: batches(seed, named) for seed, part in enumerate(("train", "val", "test"))})
    result = bp.compress(
        network,
        data,
        output=tmp_path / "out",
        max_drop=0.5,
        recipe=tiny_recipe(tiny_training(epochs=2, train="all", weight_lr=1.0, lr=0.02)),
        search=SearchConfig(framework="loss+basis", polish=False, tolerance=0.6),
    )
    assert result.summary.chosen.parameters < result.summary.reference.parameters
    assert not result.summary.not_written

    given, _ = batches(5, named)[0]
    parts = given if named else dict(zip(("image", "mask", "step"), given, strict=True))
    with torch.no_grad():
        expected = result.model(*parts.values())
        assert torch.equal(expected, result.model(given))
        assert torch.equal(expected, result.model(packed(given)))
        loaded = bp.from_pretrained(tmp_path / "out" / "model")
        assert torch.equal(expected, loaded(**parts) if named else loaded(*given))
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    names = list(parts) if named else ["input0", "input1", "input2"]
    assert [each.name for each in session.get_inputs()] == names
    assert [each.type for each in session.get_inputs()] == ["tensor(float)", "tensor(bool)", "tensor(int64)"]
    feed = {name: each.numpy() for name, each in zip(names, parts.values(), strict=True)}
    (found,) = session.run(None, feed)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


def test_stages_take_a_network_that_is_told_its_inputs():
    torch.manual_seed(0)
    data = batches(0, named=True)
    network = SeveralInputs.of(Masked(), data[0][0]).eval()
    split = bp.decompose(network.double(), scale_init=1.0).float()
    given = data[0][0]
    with torch.no_grad():
        torch.testing.assert_close(split(given), network.float()(given), rtol=1e-4, atol=1e-4)
    small = bp.prune(split, 0.5, data)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in split.parameters())
    assert small(given).shape == (12, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.zeros(4, 3), torch.zeros(5)), "one row for each example"),
        ({"image": torch.zeros(4, 3), "scale": torch.tensor(2.0)}, "one row for each example"),
        ((torch.zeros(4, 3), torch.full((4,), 1 << 25)), "no float holds"),
        ((torch.zeros(4, 3), "text"), "one row for each example"),
    ],
)
def test_inputs_that_are_no_rows_of_examples_are_refused(given, said):
    with pytest.raises(DataError, match=said):
        packed(given)
