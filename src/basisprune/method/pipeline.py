"""Train, score, plan, prune, tune: the only file that knows the order of the stages (the paper's Algorithm 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from basisprune.budget import Ratios
from basisprune.budget.goal import step_ratio
from basisprune.budget.metrics import value_of
from basisprune.budget.planning import NO_FILTERS, CostPlanner, Scored
from basisprune.callback import Callback, NullCallback, counted
from basisprune.costs import measure
from basisprune.data import LabelledImages, LoaderPart, Loaders, Splits, load_data
from basisprune.deploy.fold import settle
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
from basisprune.method.states import FULLY, NOT_AT_ALL, Plan, Pruned, Stage, StageStore, State, Tuning, fingerprint
from basisprune.planning import largest_ratio, plan_basis, plan_filters, traced
from basisprune.pruning import prune_basis, prune_filters
from basisprune.recipes import (
    DECOMPOSED,
    DENSE,
    GIVEN,
    POLISHED,
    Framework,
    FrameworkName,
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
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate, judge, validation_images
from basisprune.training.loop import fit
from basisprune.training.trainable import set_trainable
from basisprune.training.trainer import Session
from basisprune.transfer.model import spec_of, with_shape
from basisprune.types import OUTPUT, BlockPlan, FilterPlan


@dataclass
class Pipeline:
    """Runs frameworks on one model and one dataset, and trains what they share only once.

    `model` comes from `transfer_model` and is not modified; `data` is anything that `load_data` takes, or `Loaders`.
    With `checkpoints`, a folder, a run that was killed resumes where it stopped. `callback` is notified of each step;
    without one, training shows a progress bar, with `progress=None` only in a terminal. With a `planner`, `prune`
    removes a fraction of what that counts, instead of the same fraction of all that the move prunes. A model that is
    `trained` for these classes already is pruned as it is; only what is pruned from it is trained. `task` is what the
    network is for; accuracies are those of its metric.
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
    _known: dict[Steps, State] = field(default_factory=dict, init=False, repr=False)
    _last_scored: tuple[Steps, str, ScoredFilters] | None = field(default=None, init=False, repr=False)
    _last_thinned: tuple[State, str, float, State] | None = field(default=None, init=False, repr=False)
    _last_basis: tuple[State, ScoredBasis] | None = field(default=None, init=False, repr=False)
    _last_frontier: tuple[Steps, Move, Scored, PlanFrontier] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.settings = for_task(find_recipe(self.recipe), self.task)
        self.notify: Callback = self.callback or NullCallback()
        if isinstance(self.data, Loaders):
            self.data = self.data.splits(self.task)
        if isinstance(self.data, Splits) and isinstance(self.data.train, LoaderPart):
            self.settings = for_own_inputs(self.settings)
            self.model = with_shape(self.model, self.data.train.shape)
        self.spec = spec_of(self.model)
        self.splits = self.data if isinstance(self.data, Splits) else load_data(self.data, size=self.spec.image_size)
        val = validation_images(self.model, self.splits, self.task)
        self.val, scored_on = judging_and_scoring(val, self.splits.train, self.settings)
        self.scoring = Scoring(self.settings, self.spec, self.splits.train, scored_on, self.notify.log, self.task)
        root = None if self.checkpoints is None else Path(self.checkpoints)
        self.store = StageStore(root, self.notify.log) if self.callback is not None else StageStore(root)

    def run(
        self,
        framework: FrameworkName | Framework,
        *,
        basis_ratio: float = 0.5,
        filter_ratio: float = 0.5,
        iterations: int = 1,
    ) -> Pruned:
        """The result of one of the paper's frameworks: train, score, prune, train.

        `basis_ratio` is the fraction of all basis vectors removed by the frameworks with a basis,
        `filter_ratio` that of all filters by those that prune filters. With several `iterations`, each pruning is
        done in that many equal steps with training in between.
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
        accuracy = None if self.splits.test is None else self._accuracy(state.model, self.splits.test)
        shown = self.task.metric_name, self.task.is_share
        return Pruned(framework.name, state.model, state.stages, state.plans, accuracy, *shown)

    def start(self, framework: Framework) -> State:
        """The trained network that the framework prunes."""
        return self.decomposed() if framework.start == DECOMPOSED.name else self.dense()

    def dense(self) -> State:
        """The trained model, where all frameworks without a basis start."""
        if not self.trained:
            return self._start(DENSE, lambda: self.model)
        steps = (DENSE,)
        if steps not in self._known:
            self.notify.log("the network is taken as it is given, without training")
            model = copy.deepcopy(self.model)
            stage, said = self._stage(named(steps), model)
            self._known[steps] = State(steps, model, (stage,), outcomes=said)
        return self._known[steps]

    def given(self) -> State:
        """The model as it was given; one that was trained for these classes before may need no training."""
        steps = (GIVEN,)
        if steps not in self._known:
            stage, said = self._stage(named(steps), copy.deepcopy(self.model))
            self._known[steps] = State(steps, self.model, (stage,), outcomes=said)
        return self._known[steps]

    def decomposed(self) -> State:
        """The model decomposed and trained, where all frameworks with a basis start.

        A basis that depends on the loss is computed on the already trained network; the split then changes nothing.
        """
        if self.settings.basis == "loss":
            return self._split_trained()
        return self._start(DECOMPOSED, lambda: self.scoring.split(self.model))

    def _split_trained(self) -> State:
        dense, steps = self.dense(), (DECOMPOSED,)
        if steps not in self._known:
            split = self.scoring.split(dense.model)
            stage, said = self._stage(named(steps), split)
            self._known[steps] = State(steps, split, (*dense.stages, stage), outcomes=said)
        return self._known[steps]

    def adopt(self, state: State) -> None:
        """Uses a network that another pipeline trained on the same images, instead of training it here."""
        self._known[state.steps] = state

    def _start(self, step: Step, build: Callable[[], nn.Module]) -> State:
        steps = (step,)
        if steps not in self._known:
            self.claim_folder()
            self._known[steps] = self._train(State(steps, build()), self.settings.train)
        return self._known[steps]

    def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
        """The state without the fraction `ratio` of all that the move prunes, tuned according to `tuning`.

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
        """The state without these fractions of what the move prunes, tuned once, according to `tuning`."""
        if move.axis == "basis":
            return self.prune_basis(state, ratios.basis, tuning)
        if move.axis == "filters" or not ratios.basis:
            return self.prune_filters(state, move.scores, ratios.filters, tuning)
        thinned = self._thinned(state, move.scores, ratios.filters) if ratios.filters else state
        return self.prune_basis(thinned, ratios.basis, tuning)

    def outlook(self, state: State, move: Move, smallest: float) -> Outlook | None:
        """What the scores expect of each share that the move could keep; None unless they are in units of the loss.

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
            rises.append(self._filter_outlook(state))
        if "basis" in move.axes:
            _, scores, _ = self._scored_basis(state)
            rises.append(lambda ratio: expected_of_basis(plan_basis(scores, ratio, self.settings.plan), scores))
        return Outlook.of(partial(expected_of_all, rises), smallest)

    def _filter_outlook(self, state: State) -> Callable[[float], float]:
        coupling, scores, _ = self._scored_filters(state, "loss")
        config = self.scoring.filter_plan("loss")

        def rise(ratio: float) -> float:
            plan = plan_filters(state.model, scores, ratio, config, coupling=coupling)
            return expected_of_filters(state.model, plan, scores, config)

        return rise

    def _prune_by_cost(self, planner: CostPlanner, state: State, move: Move, ratio: float, tuning: Tuning) -> State:
        steps = state.after(planner.step(move, ratio))
        known = self._known.get(steps)
        if known is not None and self._is_tuned(known, tuning):
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
        self.notify.log(planner.told(plan, *thinned))
        plans: tuple[Plan, ...] = (*(thinned or (plan.filters,)), plan.basis)
        pruned = scored.pruned(plan, self.settings.compensate)
        if plan.blocks:
            plans = (*plans, BlockPlan(plan.blocks))
        self._known[steps] = self.tune(state, steps, pruned, *plans, tuning=tuning)
        return self._known[steps]

    def _frontier(self, planner: CostPlanner, state: State, move: Move) -> tuple[Scored, PlanFrontier]:
        """The scores of all that the move prunes, and the plans by them; kept for the next candidate."""
        if self._last_frontier is None or self._last_frontier[:2] != (state.steps, move):
            model = self.scoring.in_basis(state.model) if "basis" in move.axes else state.model
            self.notify.log("scoring all that can go on the training images")
            refit = self.settings.filter_compensate == "refit"
            batches, loss = self.scoring.basis_batches(), self.scoring.loss
            scored = Scored.of(model, traced(model), batches, move.axes, refit=refit, loss=loss)
            frontier = planner.frontier(scored, self.settings.plan, self.spec, self.notify.log)
            self._last_frontier = state.steps, move, scored, frontier
        return self._last_frontier[2:]

    def prune_basis(self, state: State, ratio: float, tuning: Tuning = FULLY) -> State:
        """The state without the fraction `ratio` of its basis vectors."""
        steps = state.after(Step("basis", ratio))
        known = self._known.get(steps)
        if known is not None and self._is_tuned(known, tuning):
            return known
        model, scores, statistics = self._scored_basis(state)
        plan = self.store.plan(steps, plan_basis(scores, ratio, self.settings.plan))
        self.notify.log(f"removing {plan.removed} of {plan.total} basis vectors")
        pruned = prune_basis(model, plan, compensate=self.settings.compensate, statistics=statistics)
        self._known[steps] = self.tune(state, steps, pruned, plan, tuning=tuning)
        return self._known[steps]

    def _is_tuned(self, state: State, tuning: Tuning) -> bool:
        """Whether a network that was tuned before needs no more tuning for this purpose."""
        epochs = len(state.stages[-1].history)
        config, history = self.settings.finetune, state.stages[-1].history
        over = epochs == config.epochs or out_of_patience(history, config.patience)
        return over or tuning.may_end(epochs, state.stages[-1].accuracy)

    def prune_filters(self, state: State, method: str, ratio: float, tuning: Tuning = FULLY) -> State:
        """The state without the fraction `ratio` of its filters, ranked by the method's scores."""
        steps = state.after(Step(method, ratio))
        coupling, scores, statistics = self._scored_filters(state, method)
        plan = self.store.plan(
            steps, plan_filters(state.model, scores, ratio, self.scoring.filter_plan(method), coupling=coupling)
        )
        self.notify.log(f"removing {plan.removed} of {plan.total} filters")
        for name, reason in plan.coupling.frozen.items():
            if not name.endswith(".basis") and reason != OUTPUT:
                self.notify.log(f"  {name} keeps its filters: {reason}")
        pruned = prune_filters(state.model, plan, compensate=self.settings.filter_compensate, statistics=statistics)
        return self.tune(state, steps, pruned, plan, tuning=tuning)

    def _scored_filters(self, state: State, method: str) -> ScoredFilters:
        """The coupling and the scores of all filters; kept for the next candidate from the same state."""
        if self._last_scored is None or self._last_scored[:2] != (state.steps, method):
            self._last_scored = (state.steps, method, self.scoring.filters(state.model, method))
        return self._last_scored[2]

    def _thinned(self, state: State, method: str, ratio: float) -> State:
        """Return the state without the fraction of its filters, not tuned; the last one is kept."""
        if (
            self._last_thinned is None
            or self._last_thinned[0] is not state
            or self._last_thinned[1:3] != (method, ratio)
        ):
            thinned = self.prune_filters(state, method, ratio, NOT_AT_ALL)
            self._last_thinned = state, method, ratio, thinned
        return self._last_thinned[3]

    def _scored_basis(self, state: State) -> ScoredBasis:
        """Return the network in its scored basis, with scores and statistics; those of the last state are kept."""
        if self._last_basis is None or self._last_basis[0] is not state:
            self._last_basis = state, self.scoring.basis(state.model)
        return self._last_basis[1]

    def polish(self, state: State) -> State:
        """The state tuned again, for all fine-tuning epochs of the recipe."""
        return self._train(self._settled(replace(state, steps=state.after(POLISHED))), self.settings.finetune)

    def tune(self, state: State, steps: Steps, pruned: nn.Module, *plans: Plan, tuning: Tuning = FULLY) -> State:
        """The state after pruning, tuned according to `tuning`; `steps` and `plans` say how it was pruned."""
        pruned = Processes.here().agree(pruned)
        untuned, said = self._stage(f"{named(steps)}, not tuned", pruned)
        stages, all_plans = (*state.stages, untuned), (*state.plans, *plans)
        after = State(steps, pruned, stages, all_plans, said, state.tuned)
        to_be_tuned = tuning.even_unchanged or after.has_to_recover
        if not to_be_tuned or tuning.may_end(0, untuned.accuracy):
            return after
        return self._train(self._settled(after), self.settings.finetune, tuning)

    def _settled(self, state: State) -> State:
        """The state in the form that is trained: a whole pair that will be deployed as one layer is that layer.

        Where the method alone trains, it stays a pair, for its scales.
        """
        if self.settings.finetune.train == "method":
            return state
        times = None if self.planner is None else self.planner.table
        return replace(state, model=settle(state.model, example_input(state.model, self.spec.shape), times))

    def _train(self, state: State, config: TrainConfig, tuning: Tuning = FULLY) -> State:
        checkpoint = self.store.path(state.steps, ".pt")
        resumed = checkpoint is not None and checkpoint.exists()
        doing = "going on from its checkpoint, up to" if resumed else "training for"
        self.notify.log(f"{state.name}: {doing} {counted(config.epochs, 'epoch')}")

        def stop(history: Sequence[EpochRecord]) -> bool:
            accuracy = history[-1].val_accuracy
            return accuracy is not None and tuning.may_end(len(history), accuracy)

        # The unpruned network is the teacher of networks pruned from it.
        start = self._known.get(state.steps[:1], self._known.get((DENSE,)))
        result = fit(
            state.model,
            self.splits.train,
            self.val,
            config,
            checkpoint=checkpoint,
            progress=self.progress,
            session=Session(
                teacher=None if start is None else start.model, stop=stop, callback=self.callback, task=self.task
            ),
        )
        stage, said = self._stage(state.name, result.model, result.history)
        stages, plans = (*state.stages, stage), state.plans
        return State(state.steps, result.model, stages, plans, said, tuned=len(plans))

    def _stage(self, name: str, model: nn.Module, history: tuple[EpochRecord, ...] = ()) -> tuple[Stage, Outcomes]:
        tuning = self.settings.finetune
        set_trainable(model, scales=tuning.train_scales, train=tuning.train)
        report = measure(model)
        with precision(model, self.settings):
            said = self.outcomes(model, self.val)
        accuracy = value_of(self.task.budget_metric, said)
        return Stage(name, accuracy, report.parameters, report.trainable, report.macs, history), said

    def _accuracy(self, model: nn.Module, data: LabelledImages) -> float:
        return evaluate(model, data, task=self.task).accuracy

    def outcomes(self, model: nn.Module, data: LabelledImages) -> Outcomes:
        """What the model says of each example."""
        return judge(model, data, self.task)

    def claim_folder(self) -> None:
        """Records the common settings of runs in the folder; raises CheckpointError if they differ."""
        if self.store.root is not None:  # fingerprints are slow
            self.store.claim(self._common())

    def check_folder(self) -> None:
        """Raise the error that `claim_folder` would raise, as far as it can be known; writes nothing."""
        if self.store.root is not None and self.store.root.is_dir():
            self.store.check(self._common())

    def _common(self) -> dict[str, object]:
        """What all starts of a run in the folder have in common."""
        recipe = self.settings
        common: dict[str, object] = {
            "basis": recipe.basis,
            "scale_init": recipe.scale_init,
            "compensate": recipe.compensate,
            "basis_images": recipe.basis_images,
            "score_images": recipe.score_images,
            "score_batch": recipe.score_batch,
            "rebase": recipe.rebase,
            "scores": recipe.scores,
            "filter_compensate": recipe.filter_compensate,
            "linear": recipe.linear,
        }
        if self.trained:
            common["trained"] = True
        if named_task := self.task.to_dict():
            common["task"] = ", ".join(named_task.values())
        return common | fingerprint(self.model, self.splits, with_head=self.trained)


def run(
    framework: FrameworkName | Framework,
    model: nn.Module,
    data: Any,
    *,
    basis_ratio: float = 0.5,
    filter_ratio: float = 0.5,
    recipe: str | Recipe = "quick",
    iterations: int = 1,
    checkpoints: str | Path | None = None,
) -> Pruned:
    """The result of one of the paper's frameworks; use `Pipeline` to compare several, which is faster."""
    pipeline = Pipeline(model, data, recipe, checkpoints)
    return pipeline.run(framework, basis_ratio=basis_ratio, filter_ratio=filter_ratio, iterations=iterations)
