"""Mean IoU and Dice, counted over all examples, against torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_f1_score, multiclass_jaccard_index

from basisprune.errors import ConfigError, DataError
from basisprune.tasks import segmentation

seeds = st.integers(0, 10_000)


def drawn(seed: int, classes: int = 3, count: int = 4, side: int = 5):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, classes, side, side, generator=generator)
    return scores, torch.randint(0, classes, (count, side, side), generator=generator)


@given(seeds)
def test_mean_iou_and_dice_are_those_of_torchmetrics(seed):
    scores, masks = drawn(seed)
    masks[0, 0] = 255  # which do not count
    for metric, reference in (("iou", multiclass_jaccard_index), ("dice", multiclass_f1_score)):
        task = segmentation(metric, ignore_index=255)
        found = task.value(task.rows(scores, masks, len(scores)))
        wanted = reference(scores.argmax(1), masks, 3, average="macro", ignore_index=255)
        assert found == pytest.approx(float(wanted), abs=1e-6)


@given(seeds)
def test_the_order_of_examples_changes_nothing(seed):
    scores, masks = drawn(seed)
    task = segmentation()
    rows = task.rows(scores, masks, len(scores))
    assert task.value(rows) == task.value(np.random.default_rng(seed).permutation(rows))
    apart = np.concatenate([task.rows(scores[i : i + 1], masks[i : i + 1], 1) for i in range(len(scores))])
    assert np.array_equal(rows, apart)  # nor do batches


def test_a_perfect_mask_has_all_and_a_class_that_is_nowhere_does_not_count():
    masks = torch.tensor([[[0, 1], [1, 0]]])
    scores = F.one_hot(masks, 5).movedim(-1, 1).float()
    for metric in ("iou", "dice"):
        task = segmentation(metric)
        assert task.value(task.rows(scores, masks, 1)) == 1.0


def test_one_channel_is_one_class_beside_the_background():
    scores, masks = torch.tensor([[[[2.0, -1.0, 3.0, -2.0]]]]), torch.tensor([[[1, 1, 0, 0]]])
    task = segmentation()
    assert task.value(task.rows(scores, masks, 1)) == pytest.approx(1 / 3)
    wanted = F.binary_cross_entropy_with_logits(scores[:, 0], masks.float())
    assert torch.isclose(task.loss(scores, masks), wanted)


def test_the_loss_is_the_cross_entropy_of_the_pixels_that_count():
    scores, masks = drawn(0)
    masks[:, 0] = -100
    assert torch.isclose(segmentation().loss(scores, masks), F.cross_entropy(scores, masks))
    masks[:] = -100
    assert segmentation().loss(scores, masks) == 0  # and not NaN


def test_dicts_of_torchvision_are_read_and_others_refused():
    scores, _ = drawn(0)
    assert segmentation().output({"out": scores, "aux": scores}) is scores
    with pytest.raises(DataError, match=r"the network outputs \(4, 3\); scores \(N, classes, ...\)"):
        segmentation().output(scores[:, :, 0, 0])


def test_masks_that_do_not_fit_are_refused():
    scores, masks = drawn(0)
    with pytest.raises(DataError, match=r"masks \(4, 4, 5\) given for scores \(4, 3, 5, 5\)"):
        segmentation().loss(scores, masks[:, :4])
    with pytest.raises(DataError, match=r"class 7 in a mask; 0\.\.2 is allowed"):
        segmentation().outcome(scores, 0 * masks + 7)
    with pytest.raises(ConfigError, match=r"'diice' given; allowed are iou, dice\. Did you mean 'dice'"):
        segmentation("diice")


def test_a_teacher_that_says_the_same_is_at_no_distance():
    scores, _ = drawn(0)
    assert float(segmentation().distance(scores, scores)) == pytest.approx(0, abs=1e-6)
    assert float(segmentation().distance(scores, -scores)) > 0


@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_refuses_classes_that_there_are_not_by_their_number(channels):
    masks = torch.zeros(1, 2, 2).long()
    masks[0, 0, 0] = 255
    with pytest.raises(DataError, match=r"class 255 in a mask.*segmentation\(ignore_index"):
        segmentation().output_loss(torch.zeros(1, channels, 2, 2, requires_grad=True), masks)
    assert segmentation(ignore_index=255).output_loss(torch.zeros(1, channels, 2, 2, requires_grad=True), masks) > 0
