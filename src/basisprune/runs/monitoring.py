"""New images without labels -> whether a deployed network still keeps its promise on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats
from torch import nn

from basisprune.budget.certify import Certificate
from basisprune.budget.metrics import value_of
from basisprune.callback import Callback, NullCallback
from basisprune.data import LabelledImages
from basisprune.data.load import Reading, Source, with_unlabelled
from basisprune.errors import ConfigError
from basisprune.files import user_path
from basisprune.runs.compress import Compressed, repeat_run
from basisprune.runs.record import (
    Answers,
    Labelling,
    identity,
    in_random_order,
    read_answers,
    read_labels,
    write_answers,
)
from basisprune.tasks import CLASSIFICATION, Predictions
from basisprune.training.evaluation import judge
from basisprune.transfer.model import spec_of

CHECKS = "checks"
_DRIFT = 0.01
"""The p-value of the number of differing answers below which there is a warning."""


@dataclass(frozen=True)
class Check:
    """How often answers differ now, and did when the budget was confirmed; `p_value` is of Fisher's exact test."""

    images: int
    differing: int
    images_before: int
    differing_before: int
    p_value: float
    certificate: Certificate
    folder: Path

    @property
    def has_drifted(self) -> bool:
        """Whether answers differ more often than chance explains."""
        return self.p_value <= _DRIFT

    @property
    def verdict(self) -> str:
        now, before = self.differing / self.images, self.differing_before / self.images_before
        said = (
            f"On {self.differing:,} of {self.images:,} new images ({now:.1%}) the answers of the two networks differ; "
            f"when the budget was confirmed, on {self.differing_before:,} of {self.images_before:,} ({before:.1%})."
        )
        if self.has_drifted:
            said += (
                f" Warning: that is more often than chance explains (p = {self.p_value:.2g}); the promise may not hold."
            )
        found = self.certificate
        if found.certified:
            return f"{said} The budget is kept on the new images, with {found.confidence:.0%} confidence."
        return f"{said} On the new images it is not certified: {found.reason}."


def check_run(
    folder: str | Path,
    unlabelled: Source,
    labels: str | Path | None = None,
    *,
    trust_code: bool = False,
    callback: Callback | None = None,
) -> Check:
    """Return whether the delivered network of a run still answers as the unpruned one does, on new images.

    The answers, labels given so far and a page that asks for more are in a folder of that name in the run's `checks/`.
    Raises ConfigError for a run without a budget of accuracy, or images to confirm it.
    """
    path, callback = user_path(folder, "run"), callback or NullCallback()
    result = repeat_run(path, trust_code=trust_code, callback=callback)
    guarantee, data = result.guarantee, result.data
    if guarantee is None or not guarantee.is_a_drop or guarantee.metric != "accuracy" or data.confirm is None:
        raise ConfigError(f"{path}: its run has no loss of accuracy that images have confirmed, to compare with")
    networks = (result.original, result.model)
    images = with_unlabelled(data, unlabelled, spec_of(result.model).image_size, Reading(callback=callback)).confirm
    assert images is not None
    place = path / CHECKS / (Path(str(unlabelled)).name or "images")
    command = f"basisprune certify {folder} --unlabelled {unlabelled} --labels labels.csv"
    labelling, order = _labelling(result, networks, images, place, labels)
    tests = labelling.tests([result.found.chosen])
    before = [_answers(network, data.confirm) for network in networks]
    counts = (labelling.differing, len(order)), (int((before[0] != before[1]).sum()), len(data.confirm))
    if labelling.is_open:
        labelling.write_page(place, images, order, command)
    return Check(
        counts[0][1],
        counts[0][0],
        counts[1][1],
        counts[1][0],
        float(stats.fisher_exact([[many, total - many] for many, total in counts], alternative="greater").pvalue),
        labelling.certificate(tests, place, command),
        place,
    )


def _labelling(
    result: Compressed,
    networks: tuple[nn.Module, nn.Module],
    images: LabelledImages,
    place: Path,
    labels: str | Path | None,
) -> tuple[Labelling, npt.NDArray[np.int64]]:
    """Return the test of the delivered network on the new images, whose answers and labels are kept at `place`."""
    assert result.guarantee is not None
    trials = result.found.trials
    names = [identity(trials[index]) for index in (0, result.found.chosen)]
    order, called = in_random_order(images, seed=0)
    answers = [tuple(map(int, _answers(network, images)[order])) for network in networks]
    place.mkdir(parents=True, exist_ok=True)
    earlier = read_answers(place)
    known = earlier.labels if earlier is not None and earlier.images == called else {}
    kept = Answers(called, images.classes, dict(zip(names, answers, strict=True)), known)
    if labels is not None:
        kept = kept.with_labels(read_labels(user_path(labels, "labels"), called), str(labels))
    write_answers(place, kept)
    value = value_of("accuracy", result.found.reference.outcomes)
    return Labelling(result.guarantee, kept, names[0], names[1:], [result.chosen.label], value), order


def _answers(network: nn.Module, images: LabelledImages) -> npt.NDArray[np.int64]:
    found = judge(network, images, CLASSIFICATION)
    assert isinstance(found, Predictions)
    return found.classes
