"""The expected time of a search, measured on a few real training steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.budget import Budget
from basisprune.budget.certify import Guarantee, certifiable
from basisprune.data import LabelledImages, LoaderPart, PreparedBatches, Splits, take
from basisprune.importance.taylor import mean_square_products
from basisprune.recipes import DECOMPOSED, Recipe
from basisprune.runs.load import Job
from basisprune.runs.settings import RunConfig
from basisprune.search import SAFER, SearchConfig
from basisprune.search.stepping import axes_of, most_steps
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate
from basisprune.training.lessons import Session
from basisprune.training.loop import fit
from basisprune.transfer.model import spec_of

_STEPS = 2
_PART = 4
"""The batches that are timed are smaller than those of a training by this factor: what is said must not take long."""
_LOOKS, _SHARE = 2, 0.55
"""How often a network is pruned and tuned briefly for each that is tuned fully, and what a step of one costs of a step
of the unpruned network: rough numbers of runs on two networks."""
_GALLOPS = 3
_FORESEEN = 4


@dataclass(frozen=True)
class Estimate:
    """Seconds for the unpruned network and per candidate, with all epochs; `most` is rarely exceeded."""

    reference: float
    candidates: int
    candidate: float
    most: int

    @property
    def total(self) -> float:
        return self.reference + self.candidates * self.candidate

    @property
    def longest(self) -> float:
        return self.reference + self.most * self.candidate


def expected_candidates(config: RunConfig) -> int:
    """Return about how many networks a search tries besides the unpruned one; exact for fixed ratios.

    Where the scores of a move foresee the loss, that is how many are tuned for all epochs, and one to fall back on;
    otherwise three steps until a candidate is too small, then as many as it takes to narrow one step down to the
    tolerance.

    >>> from basisprune.search import SearchConfig
    >>> [expected_candidates(RunConfig(search=SearchConfig(framework=name))) for name in ("basis", "basis+l1")]
    [2, 8]
    """
    search, goal, moves = config.search, config.goal, config.method.moves
    if not isinstance(goal, Budget):
        return 1
    if not goal.is_about_accuracy:
        return len(moves) * _GALLOPS
    foreseen = _FORESEEN if search.tunings is None else search.tunings + 1
    each = (foreseen if config.recipe.foresees(move) else _GALLOPS + _narrowing(search) for move in moves)
    return sum(each) + polishes(config)


def most_candidates(config: RunConfig, *, confirms: bool = True) -> int:
    """How many networks a search seldom tries more of, besides the unpruned one.

    Where images confirm the budget and no candidate is likely to be certified, it is gone through twice; where none is
    sure to be, some larger ones are tried.
    """
    search, goal, moves = config.search, config.goal, config.method.moves
    if not isinstance(goal, Budget) or not goal.is_about_accuracy:
        return expected_candidates(config)
    furthest = math.ceil(math.log(search.smallest) / math.log(search.step))
    each = (
        most_steps(search.smallest, search.tolerance, axes_of(move, by_cost=config.optimize != "params"))
        if config.recipe.foresees(move)
        else furthest + _narrowing(search)
        for move in moves
    )
    polish = polishes(config)
    steps = sum(each) + polish
    return 2 * steps - polish + SAFER if confirms else steps


def polishes(config: RunConfig) -> bool:
    """Whether the network that was found is tuned once more."""
    asked = config.search.polish
    return not all(map(config.recipe.foresees, config.method.moves)) if asked is None else asked


def _narrowing(search: SearchConfig) -> int:
    """The candidates that it takes to narrow one step down to the tolerance."""
    return math.ceil(math.log2(max(math.log(search.step) / math.log(1 - search.tolerance), 1)))


def searches_twice(promise: Guarantee | None, data: Splits) -> bool:
    """Whether a search is likely to find nothing that could be certified, and then to start again by the estimate."""
    if promise is None or promise.metric != "accuracy" or promise.budget.max_drop is None or data.confirm is None:
        return False
    enough = certifiable(len(data.confirm), confidence=promise.confidence) <= promise.budget.max_drop
    return not enough and promise.reachable(data.confirm.labels)


def estimate(job: Job) -> Estimate:
    """How long a run would take; writes nothing and does not modify the model."""
    recipe, data = job.config.recipe, job.splits
    start = time.perf_counter()
    split = (
        decompose(job.network, scale_init=recipe.scale_init)
        if job.config.method.start == DECOMPOSED.name
        else job.network
    )
    before = time.perf_counter() - start
    task = job.config.task
    training = seconds_per_pass(split, data, recipe.train, task)
    tuning = training if recipe.finetune == recipe.train else seconds_per_pass(split, data, recipe.finetune, task)
    # What is decomposed before it is trained is compared with the network that was not, which is trained too.
    trainings = (2 if split is not job.network and recipe.basis != "loss" else 1) - job.config.is_trained
    expected, most = expected_candidates(job.config), most_candidates(job.config, confirms=data.confirm is not None)
    if searches_twice(job.config.guarantee, data):
        expected = min(2 * expected, most)
    plan = seconds_to_plan(split, data, recipe, task)
    candidate = plan + recipe.finetune.epochs * tuning
    if all(map(recipe.foresees, job.config.method.moves)) and job.config.search.tunings is not None:
        # The last one, to fall back on, is tuned briefly.
        fully, briefly = _SHARE * recipe.finetune.epochs * tuning, _SHARE * plan + _SHARE * tuning
        candidate = ((expected - 1) * (fully + _LOOKS * briefly) + briefly) / max(expected, 1)
    return Estimate(
        reference=before + trainings * recipe.train.epochs * training,
        candidates=expected,
        candidate=candidate,
        most=most,
    )


def seconds_to_plan(model: nn.Module, data: Splits, recipe: Recipe, task: Task = CLASSIFICATION) -> float:
    """The seconds for all scores, measured on a few batches, and for whatever else looks at the basis images."""
    val, basis_images = data.val or data.train, min(recipe.basis_images, len(data.train))
    images = len(val) if recipe.score_images is None else min(recipe.score_images, len(val) // 2)
    if recipe.scores == "loss":
        images = basis_images
    some = _first(val, _STEPS * recipe.score_batch)
    batches = PreparedBatches(some, spec_of(model), batch_size=recipe.score_batch)
    start = time.perf_counter()
    mean_square_products(model, [[next(model.parameters())]], batches, task)
    seconds = (time.perf_counter() - start) / len(some)
    by_loss = recipe.basis == recipe.scores == "loss"  # one pass for the basis and its scores, and one for the filters
    passes = 1 if by_loss else (recipe.compensate == "refit") + recipe.rebase
    return seconds * (images + passes * basis_images)


def seconds_per_pass(model: nn.Module, data: Splits, config: TrainConfig, task: Task = CLASSIFICATION) -> float:
    """The seconds for one training epoch and one evaluation, measured on a few batches of each."""
    size = max(config.batch_size // _PART, 1)
    one = replace(config, epochs=1, batch_size=size, tracker=None, distill=0.0, choices=None)
    session = Session(task=task)
    fit(model, _first(data.train, size), None, one, progress=False, session=session)  # the first batch is slow
    some = _first(data.train, _STEPS * size)
    start = time.perf_counter()
    fit(model, some, None, one, progress=False, session=session)
    seconds = (time.perf_counter() - start) * len(data.train) / len(some)
    if data.val is not None:
        some = _first(data.val, _STEPS * size)
        start = time.perf_counter()
        evaluate(model, some, batch_size=size, task=task)
        seconds += (time.perf_counter() - start) * len(data.val) / len(some)
    return seconds * (1.0 if config.choices is None else 1.0 + config.choices.cost)


def _first(data: LabelledImages, count: int) -> LabelledImages:
    """The first images, this many, or the batches of a loader that have them."""
    if isinstance(data, LoaderPart):
        batches, seen = [], 0
        for batch in data:
            batches.append(batch)
            seen += len(batch.inputs)
            if seen >= count:
                break
        return LoaderPart(batches, data.task, data.name)
    return take(data, range(min(count, len(data))))
