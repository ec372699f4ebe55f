"""Images -> whether they may be mirrored: photos may, digits, letters and signs may not."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.data import LabelledImages, make_loader, prepare, take
from basisprune.types import InputSpec

_MOST_IMAGES, _SIDE, _FOLDS = 1000, 16, 5
_RIDGE = 1.0
"""Of the mean variance of the images, so that the classifier does not follow single ones."""
_DEVIATIONS, _DROP = 2.5, 0.1
"""Mirrored images are others where so many standard errors, and this share of what beats chance, are lost."""


def may_be_mirrored(images: LabelledImages, spec: InputSpec, *, seed: int = 0) -> bool:
    """Whether mirrored images are like the images themselves, as far as a simple classifier can tell.

    A linear classifier of small copies learns four fifths of the images, and is asked for the others, upright and
    mirrored. Where the one is as likely as the other, it is right as often; it needs no network, and takes a second.
    """
    chosen = np.random.default_rng(seed).permutation(len(images))[:_MOST_IMAGES]
    seen, labels = [], []
    for pixels, truth in make_loader(take(images, chosen), 100, size=spec.image_size):
        seen.append(F.adaptive_avg_pool2d(prepare(pixels, spec, prepared=images.prepared), _SIDE))
        labels.append(truth)
    small, classes = torch.cat(seen), torch.cat(labels)
    upright, mirrored = _recognised(small, classes)
    lost = upright - mirrored
    deviations = lost.sum() / lost.square().sum().clamp_min(1).sqrt()
    chance = F.one_hot(classes).float().mean(0).max()
    return bool(deviations <= _DEVIATIONS or lost.mean() <= _DROP * (upright.mean() - chance))


def _recognised(small: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 for each image that is recognised by what was learnt from other images: upright, and mirrored."""
    upright, mirrored = small.flatten(1).double(), small.flip(-1).flatten(1).double()
    wanted, fold = F.one_hot(labels).double(), torch.arange(len(labels)) % _FOLDS
    found = torch.zeros(2, len(labels))
    for number in range(min(_FOLDS, len(labels))):
        known, asked = fold != number, fold == number
        middle, usual = upright[known].mean(0), wanted[known].mean(0)
        learnt = upright[known] - middle
        products = learnt @ learnt.T
        ridge = _RIDGE * products.diagonal().mean().clamp_min(1e-9)
        weights = learnt.T @ torch.linalg.solve(products + ridge * torch.eye(len(products)), wanted[known] - usual)
        for row, given in zip(found, (upright, mirrored), strict=True):
            row[asked] = (((given[asked] - middle) @ weights + usual).argmax(1) == labels[asked]).float()
    return found[0], found[1]
