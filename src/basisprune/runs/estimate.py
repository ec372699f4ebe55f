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

_STEPS = 3
_GALLOPS = 3
_FORESEEN = 4


@dataclass(frozen=True)
class Estimate:
    """Seconds for the unpruned network and per candidate, with all epochs, and how many candidates to expect.

    `most` is what there are seldom more of.
    """

    reference: float
    candidates: int
    candidate: float
    most: int

    @property
    def total(self) -> float:
        """The seconds for as many candidates as are expected."""
        return self.reference + self.candidates * self.candidate

    @property
    def longest(self) -> float:
        """The seconds for as many candidates as there are seldom more of."""
        return self.reference + self.most * self.candidate


def expected_candidates(config: RunConfig) -> int:
    """About how many networks a search tries besides the unpruned one; exact for fixed ratios.

    It assumes four for a move whose scores foresee the loss; otherwise three steps until a candidate is too small, then
    as many as it takes to narrow one step down to the tolerance.

    >>> from basisprune.search import SearchConfig
    >>> [expected_candidates(RunConfig(search=SearchConfig(framework=name))) for name in ("basis", "basis+l1")]
    [5, 10]
    """
    search, goal, moves = config.search, config.goal, config.method.moves
    if not isinstance(goal, Budget):
        return 1
    if not goal.is_about_accuracy:
        return len(moves) * _GALLOPS
    each = (_FORESEEN if config.recipe.foresees(move) else _GALLOPS + _narrowing(search) for move in moves)
    return sum(each) + search.polish


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
    steps = sum(each) + search.polish
    return 2 * steps - search.polish + SAFER if confirms else steps


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
    trainings = 2 if split is not job.network and recipe.basis != "loss" else 1
    trainings -= job.config.is_trained  # one of them is that of the network itself
    expected, most = expected_candidates(job.config), most_candidates(job.config, confirms=data.confirm is not None)
    if searches_twice(job.config.guarantee, data):
        expected = min(2 * expected, most)
    return Estimate(
        reference=before + trainings * recipe.train.epochs * training,
        candidates=expected,
        candidate=seconds_to_plan(split, data, recipe, task) + recipe.finetune.epochs * tuning,
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
    one = replace(config, epochs=1, tracker=None, distill=0.0, choices=None)
    session = Session(task=task)
    first = _first(data.train, config.batch_size)
    fit(model, first, None, one, progress=False, session=session)  # the first batch is slow
    some = _first(data.train, _STEPS * config.batch_size)
    start = time.perf_counter()
    fit(model, some, None, one, progress=False, session=session)
    seconds = (time.perf_counter() - start) * len(data.train) / len(some)
    if data.val is not None:
        some = _first(data.val, _STEPS * config.batch_size)
        start = time.perf_counter()
        evaluate(model, some, batch_size=config.batch_size, task=task)
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
