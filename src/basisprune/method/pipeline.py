"""Train, score, plan, prune, tune: the only file that knows the order of the stages (the paper's Algorithm 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from basisprune.budget import Ratios
from basisprune.budget.goal import step_ratio
from basisprune.budget.metrics import value_of
from basisprune.budget.planning import NO_FILTERS, CostPlanner, Scored
from basisprune.callback import Callback, NullCallback, counted
from basisprune.costs import measure
from basisprune.data import LabelledImages, LoaderPart, Loaders, Splits, load_data
from basisprune.deploy.fold import merge_full_rank
from basisprune.errors import ConfigError, TooMuchError
from basisprune.joint_plan import PlanFrontier
from basisprune.method.scoring import (
    Outlook,
    ScoredBasis,
    ScoredFilters,
    Scoring,
    expected_of_all,
    expected_of_basis,
    expected_of_filters,
    judging_and_scoring,
    precision,
)
from basisprune.method.states import FULLY, UNSEEN, Plan, Pruned, Stage, StageStore, State, Tuning, claimed
from basisprune.planning import largest_ratio, plan_basis, plan_filters, traced
from basisprune.pruning import prune_basis, prune_filters
from basisprune.recipes import (
    DECOMPOSED,
    DENSE,
    GIVEN,
    LOOKED_AT,
    POLISHED,
    TUNED,
    Framework,
    Move,
    Recipe,
    Step,
    Steps,
    find_framework,
    find_recipe,
    for_own_inputs,
    for_task,
    named,
)
from basisprune.tasks import CLASSIFICATION, Outcomes, Task
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.watching import example_input
from basisprune.training.checkpoint import EpochRecord, out_of_patience
from basisprune.training.choosing import CHOSEN
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate, judge, validation_images
from basisprune.training.lessons import Session
from basisprune.training.loop import fit
from basisprune.training.trainable import set_trainable
from basisprune.training.trainer import DivergedError
from basisprune.transfer.model import spec_of, with_shape
from basisprune.types import OUTPUT, BlockPlan, FilterPlan, FrameworkName

_Found = TypeVar("_Found")
_DOING = {LOOKED_AT: "tuning briefly", TUNED: "tuning", POLISHED: "tuning once more"}
_GENTLE = 0.5  # of the rate of a long tuning: a short one has little time to settle


@dataclass
class Pipeline:
    """Runs frameworks on one model and one dataset, and trains what they share only once.

    Args:
        model: The network, from `transfer_model`; it is not modified.
        data: Anything that `load_data` takes, or `Loaders`.
        recipe: The settings of all stages, or the name of a preset.
        checkpoints: A folder in which a killed run resumes where it stopped.
        progress: Whether training shows a progress bar; None: in a terminal.
        callback: Notified of each step, in place of progress bars.
        planner: With one, `prune` removes a fraction of what it counts, instead of the same fraction of everything.
        trained: Whether the model is trained for these classes already; it is then pruned as it is.
        task: What the network is for; accuracies are those of its metric.
    """

    model: nn.Module
    data: Any
    recipe: str | Recipe = "quick"
    checkpoints: str | Path | None = None
    progress: bool | None = None
    callback: Callback | None = None
    planner: CostPlanner | None = None
    trained: bool = False
    task: Task = CLASSIFICATION
    _networks: dict[Steps, State] = field(default_factory=dict, init=False, repr=False)
    _chosen: TrainConfig | None = field(default=None, init=False, repr=False)
    _latest: dict[str, tuple[State, tuple[object, ...], Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.settings = for_task(find_recipe(self.recipe), self.task)
        self.notify: Callback = self.callback or NullCallback()
        data = self.data.splits(self.task) if isinstance(self.data, Loaders) else self.data
        if isinstance(data, Splits) and isinstance(data.train, LoaderPart):
            self.settings = for_own_inputs(self.settings)
            self.model = with_shape(self.model, data.train.shape)
        self.spec = spec_of(self.model)
        self.splits = data if isinstance(data, Splits) else load_data(data, size=self.spec.image_size)
        val = validation_images(self.model, self.splits, self.task)
        self.val, scored_on = judging_and_scoring(val, self.splits.train, self.settings)
        self.scoring = Scoring(self.settings, self.spec, self.splits.train, scored_on, self.notify.log, self.task)
        root = None if self.checkpoints is None else Path(self.checkpoints)
        self.store = StageStore(root) if self.callback is None else StageStore(root, self.callback.log)

    def run(
        self,
        framework: FrameworkName | Framework,
        *,
        basis_ratio: float = 0.5,
        filter_ratio: float = 0.5,
        iterations: int = 1,
    ) -> Pruned:
        """Run one of the paper's frameworks: train, score, prune, train.

        Args:
            framework: Its name, or one of your own.
            basis_ratio: The fraction of all basis vectors to remove.
            filter_ratio: The fraction of all filters to remove.
            iterations: The number of equal steps of each pruning, with training in between.
        """
        if not isinstance(framework, Framework):
            framework = find_framework(framework)
        if iterations < 1:
            raise ConfigError(f"run: iterations: {iterations} given; at least 1 is needed")
        self.claim_folder()
        state = self.start(framework)
        for move in framework.moves:
            for step in range(iterations):
                ratios = (step_ratio(ratio, step, iterations) for ratio in (basis_ratio, filter_ratio))
                state = self.remove(state, move, Ratios(*ratios))
        test, task = self.splits.test, self.task
        accuracy = None if test is None else evaluate(state.model, test, task=task).accuracy
        return Pruned(framework.name, state.model, state.stages, state.plans, accuracy, task.metric_name, task.is_share)

    # Where frameworks start

    def start(self, framework: Framework) -> State:
        return self.decomposed() if framework.start == DECOMPOSED.name else self.dense()

    def dense(self) -> State:
        """Return the trained model, where all frameworks without a basis start."""
        if self.trained and (DENSE,) not in self._networks:
            self.notify.log("the network is taken as it is given, without training")
        return self._first(DENSE, lambda: copy.deepcopy(self.model), train=not self.trained)

    def given(self) -> State:
        """Return the model as it was given; if it was trained for these classes before, it may need no training."""
        return self._first(GIVEN, lambda: copy.deepcopy(self.model), train=False)

    def decomposed(self) -> State:
        """Return the model decomposed and trained, where all frameworks with a basis start.

        A basis that depends on the loss is computed on the already trained network; the split then changes nothing.
        """
        if self.settings.basis != "loss":
            return self._first(DECOMPOSED, lambda: self.scoring.split(self.model), train=True)
        dense = self.dense()
        return self._first(DECOMPOSED, lambda: self.scoring.split(dense.model), train=False, before=dense.stages)

    def adopt(self, state: State) -> None:
        """Use a network that another pipeline trained on the same images, instead of training it here."""
        self._networks[state.steps] = state

    def _first(
        self, step: Step, build: Callable[[], nn.Module], *, train: bool, before: tuple[Stage, ...] = ()
    ) -> State:
        steps = (step,)
        if steps not in self._networks and train:
            self.claim_folder()
            self._networks[steps] = self._train(State(steps, build()), self.settings.train)
        elif steps not in self._networks:
            model = build()
            stage, outcomes = self._stage(named(steps), model)
            self._networks[steps] = State(steps, model, (*before, stage), outcomes=outcomes)
        return self._networks[steps]

    # Pruning

    def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
        """Return the state without the fraction `ratio` of all that the move prunes, tuned according to `tuning`.

        Where a move prunes both and only one of them can lose so much, the other loses what it can. With a planner,
        it is the fraction of parameters, multiply-adds or time.
        """
        if self.planner is not None:
            return self._prune_by_cost(self.planner, state, move, ratio, tuning)
        if move.axis != "both":
            return self.remove(state, move, Ratios(ratio, ratio), tuning)
        coupling, scores, _ = self._scored_filters(state, move.scores)
        config = self.scoring.filter_plan(move.scores)
        filters = largest_ratio(ratio, lambda less: plan_filters(state.model, scores, less, config, coupling=coupling))
        try:
            return self.remove(state, move, Ratios(ratio, filters), tuning)
        except TooMuchError:
            if filters < ratio:
                raise
        _, vectors, _ = self._scored_basis(self._thinned(state, move.scores, filters))
        basis = largest_ratio(ratio, lambda less: plan_basis(vectors, less, self.settings.plan))
        return self.remove(state, move, Ratios(basis, filters), tuning)

    def remove(self, state: State, move: Move, ratios: Ratios, tuning: Tuning = FULLY) -> State:
        """Return the state without these fractions of what the move prunes, tuned once."""
        if move.axis == "basis":
            return self.prune_basis(state, ratios.basis, tuning)
        if move.axis == "filters" or not ratios.basis:
            return self.prune_filters(state, move.scores, ratios.filters, tuning)
        thinned = self._thinned(state, move.scores, ratios.filters) if ratios.filters else state
        return self.prune_basis(thinned, ratios.basis, tuning)

    def prune_basis(self, state: State, ratio: float, tuning: Tuning = FULLY) -> State:
        """Return the state without the fraction `ratio` of its basis vectors."""
        steps = state.after(Step("basis", ratio))
        if (known := self._tuned_before(steps, tuning)) is not None:
            return known
        model, scores, statistics = self._scored_basis(state)
        plan = self.store.plan(steps, plan_basis(scores, ratio, self.settings.plan))
        self.notify.log(f"removing {plan.removed} of {plan.total} basis vectors")
        pruned = prune_basis(model, plan, compensate=self.settings.compensate, statistics=statistics)
        self._networks[steps] = self.tune(state, steps, pruned, plan, tuning=tuning)
        return self._networks[steps]

    def prune_filters(self, state: State, method: str, ratio: float, tuning: Tuning = FULLY) -> State:
        """Return the state without the fraction `ratio` of its filters, ranked by the method's scores."""
        steps, config = state.after(Step(method, ratio)), self.scoring.filter_plan(method)
        coupling, scores, statistics = self._scored_filters(state, method)
        plan = self.store.plan(steps, plan_filters(state.model, scores, ratio, config, coupling=coupling))
        self.notify.log(f"removing {plan.removed} of {plan.total} filters")
        for name, reason in plan.coupling.frozen.items():
            if not name.endswith(".basis") and reason != OUTPUT:
                self.notify.log(f"  {name} keeps its filters: {reason}")
        pruned = prune_filters(state.model, plan, compensate=self.settings.filter_compensate, statistics=statistics)
        return self.tune(state, steps, pruned, plan, tuning=tuning)

    def _prune_by_cost(self, planner: CostPlanner, state: State, move: Move, ratio: float, tuning: Tuning) -> State:
        steps = state.after(planner.step(move, ratio))
        if (known := self._tuned_before(steps, tuning)) is not None:
            return known
        scored, frontier = self._frontier(planner, state, move)
        plan = frontier.plan(ratio)
        thinned: tuple[FilterPlan, ...] = ()
        if move.axis == "both" and plan.filters.removed:
            # What is left of the basis is worth something else without those filters, so it is planned anew.
            thinned = (self.store.plan(state.after(Step(f"{planner.optimize} filters first", ratio)), plan.filters),)
            model, basis = self.scoring.basis_loss(scored.thinned(*thinned, self.settings.filter_compensate))
            scored = Scored(model, traced(model), basis, NO_FILTERS)
            plan = planner.frontier(scored, self.settings.plan, self.spec, self.notify.log).plan_within(plan.cost_left)
        plan = self.store.plan(steps, plan)
        self.notify.log(planner.describe(plan, *thinned))
        blocks = (BlockPlan(plan.blocks),) if plan.blocks else ()
        plans: tuple[Plan, ...] = (*(thinned or (plan.filters,)), plan.basis, *blocks)
        pruned = scored.pruned(plan, self.settings.compensate)
        self._networks[steps] = self.tune(state, steps, pruned, *plans, tuning=tuning)
        return self._networks[steps]

    def _tuned_before(self, steps: Steps, tuning: Tuning) -> State | None:
        """Return the network of these steps if it is there and needs no more tuning for this purpose."""
        known = self._networks.get(steps)
        if known is None:
            return None
        config, stage = self.settings.finetune, known.stages[-1]
        epochs = len(stage.history)
        is_over = epochs == config.epochs or out_of_patience(stage.history, config.patience)
        return known if is_over or tuning.may_end(epochs, stage.accuracy) else None

    # Scores, each kept for the next candidate from the same state

    def _of_state(self, what: str, state: State, options: tuple[object, ...], work: Callable[[], _Found]) -> _Found:
        """Return what `work` makes of the state, or made of it the last time."""
        known = self._latest.get(what)
        if known is None or known[0] is not state or known[1] != options:
            known = self._latest[what] = state, options, work()
        found: _Found = known[2]
        return found

    def _scored_filters(self, state: State, method: str) -> ScoredFilters:
        return self._of_state("filters", state, (method,), lambda: self.scoring.filters(state.model, method))

    def _scored_basis(self, state: State) -> ScoredBasis:
        return self._of_state("basis", state, (), lambda: self.scoring.basis(state.model))

    def _thinned(self, state: State, method: str, ratio: float) -> State:
        """Return the state without the fraction of its filters, not tuned."""
        work = partial(self.prune_filters, state, method, ratio, UNSEEN)
        return self._of_state("thinned", state, (method, ratio), work)

    def _frontier(self, planner: CostPlanner, state: State, move: Move) -> tuple[Scored, PlanFrontier]:
        """Return the scores of all that the move prunes, and the plans by them."""

        def work() -> tuple[Scored, PlanFrontier]:
            model = self.scoring.in_basis(state.model) if "basis" in move.axes else state.model
            self.notify.log("scoring all that can go on the training images")
            refit = self.settings.filter_compensate == "refit"
            batches = self.scoring.basis_batches()
            scored = Scored.of(model, traced(model), batches, move.axes, refit=refit, loss=self.task)
            return scored, planner.frontier(scored, self.settings.plan, self.spec, self.notify.log)

        return self._of_state("frontier", state, (move, planner), work)

    def outlook(self, state: State, move: Move, smallest: float) -> Outlook | None:
        """Return what the scores expect of each share that the move could keep; None if not in units of the loss.

        For both filters and basis vectors, those of the state are added up: what removing the one does to the worth of
        the other is left out.
        """
        if not self.settings.foresees(move):
            return None
        if self.planner is not None:
            _, frontier = self._frontier(self.planner, state, move)
            return Outlook.of(lambda share: frontier.expected_loss(1 - share), smallest)
        rises: list[Callable[[float], float]] = []
        if "filters" in move.axes:
            coupling, filters, _ = self._scored_filters(state, "loss")
            config = self.scoring.filter_plan("loss")

            def of_filters(ratio: float) -> float:
                plan = plan_filters(state.model, filters, ratio, config, coupling=coupling)
                return expected_of_filters(state.model, plan, filters, config)

            rises.append(of_filters)
        if "basis" in move.axes:
            _, vectors, _ = self._scored_basis(state)
            rises.append(lambda ratio: expected_of_basis(plan_basis(vectors, ratio, self.settings.plan), vectors))
        return Outlook.of(partial(expected_of_all, rises), smallest)

    # Training

    def polish(self, state: State) -> State:
        """Tune the state again, for all fine-tuning epochs of the recipe."""
        return self._tuned(state, POLISHED, self.settings.finetune)

    def tune_fully(self, state: State) -> State:
        """Tune a pruned state for all fine-tuning epochs of the recipe."""
        return self._tuned(state, TUNED, self.settings.finetune)

    def look(self, state: State) -> State:
        """Tune a pruned state for one epoch, which says what it would be after all of them."""
        config = self._with_known_choices(self.settings.finetune)
        gentle = replace(config, epochs=1, lr=_GENTLE * config.lr, min_lr=_GENTLE * config.min_lr, patience=None)
        return self._tuned(state, LOOKED_AT, gentle)

    def _tuned(self, state: State, step: Step, config: TrainConfig) -> State:
        steps = state.after(step)
        if steps not in self._networks:
            self._networks[steps] = self._train(self._merged(replace(state, steps=steps)), config)
        return self._networks[steps]

    def _with_known_choices(self, config: TrainConfig) -> TrainConfig:
        """Return the settings with what an earlier training of this run chose, instead of choosing again."""
        if self._chosen is None or config.choices is None or config.patience is not None:
            return config
        return replace(config, choices=None, **{name: getattr(self._chosen, name) for name in CHOSEN})

    def tune(self, state: State, steps: Steps, pruned: nn.Module, *plans: Plan, tuning: Tuning = FULLY) -> State:
        """Return the state after pruning, tuned; `steps` and `plans` say how it was pruned."""
        pruned = Processes.here().agree(pruned)
        if tuning is UNSEEN:
            return State(steps, pruned, state.stages, (*state.plans, *plans), state.outcomes, state.tuned)
        untuned, outcomes = self._stage(f"{named(steps)}, not tuned", pruned)
        after = State(steps, pruned, (*state.stages, untuned), (*state.plans, *plans), outcomes, state.tuned)
        if not (tuning.even_unchanged or after.has_to_recover) or tuning.may_end(0, untuned.accuracy):
            return after
        return self._train(self._merged(after), self.settings.finetune, tuning)

    def _merged(self, state: State) -> State:
        """Merge whole pairs that will be deployed as one layer, unless their scales are to be trained."""
        if self.settings.finetune.train == "method":
            return state
        times = None if self.planner is None else self.planner.table
        return replace(state, model=merge_full_rank(state.model, example_input(state.model, self.spec.shape), times))

    def _train(self, state: State, config: TrainConfig, tuning: Tuning = FULLY) -> State:
        checkpoint = self.store.path(state.steps, ".pt")
        resumed = checkpoint is not None and checkpoint.exists()
        doing = "going on from its checkpoint" if resumed else _DOING.get(state.steps[-1], "training")
        self.notify.log(f"{state.label}: {doing}, {counted(config.epochs, 'epoch')}")

        def stop(history: Sequence[EpochRecord]) -> bool:
            accuracy = history[-1].val_accuracy
            return accuracy is not None and tuning.may_end(len(history), accuracy)

        # The unpruned network is the teacher of networks pruned from it.
        start = self._networks.get(state.steps[:1], self._networks.get((DENSE,)))
        teacher = None if start is None else start.model
        session = Session(teacher=teacher, stop=stop, callback=self.callback, task=self.task)
        val = self.val if tuning.ends_early or not state.plans or config.patience is not None else None
        known = self._with_known_choices(config) if state.plans else config
        train, progress = self.splits.train, self.progress
        try:
            result = fit(state.model, train, val, known, checkpoint=checkpoint, progress=progress, session=session)
        except DivergedError as error:
            if known == config:
                raise
            self.notify.log(f"the training diverged ({error.args[0]}); it starts again, and chooses anew")
            checkpoint = self.store.path(state.after(Step("choosing")), ".pt")
            result = fit(state.model, train, val, config, checkpoint=checkpoint, progress=progress, session=session)
        if config.choices is not None and known == config:
            self._chosen = result.config
        stage, outcomes = self._stage(state.name, result.model, result.history)
        return State(state.steps, result.model, (*state.stages, stage), state.plans, outcomes, tuned=len(state.plans))

    def _stage(self, name: str, model: nn.Module, history: tuple[EpochRecord, ...] = ()) -> tuple[Stage, Outcomes]:
        tuning = self.settings.finetune
        set_trainable(model, scales=tuning.train_scales, train=tuning.train)
        report = measure(model)
        with precision(model, self.settings):
            outcomes = self.outcomes(model, self.val)
        accuracy = value_of(self.task.budget_metric, outcomes)
        return Stage(name, accuracy, report.parameters, report.trainable, report.macs, history), outcomes

    def outcomes(self, model: nn.Module, data: LabelledImages) -> Outcomes:
        return judge(model, data, self.task)

    # The folder

    def claim_folder(self) -> None:
        """Record the common settings of runs in the folder; raise CheckpointError if they differ."""
        if self.store.root is not None:  # fingerprints are slow
            self.store.claim(claimed(self.settings, self.task, self.model, self.splits, trained=self.trained))

    def check_folder(self) -> None:
        """Raise the error that `claim_folder` would raise, as far as it can be known; write nothing."""
        if self.store.root is not None and self.store.root.is_dir():
            self.store.check(claimed(self.settings, self.task, self.model, self.splits, trained=self.trained))


def run(
    framework: FrameworkName | Framework,
    model: nn.Module,
    data: Any,
    *,
    recipe: str | Recipe = "quick",
    checkpoints: str | Path | None = None,
    **options: Any,
) -> Pruned:
    """Run one of the paper's frameworks, with the options of `Pipeline.run`; to compare several, use one `Pipeline`."""
    return Pipeline(model, data, recipe, checkpoints).run(framework, **options)
