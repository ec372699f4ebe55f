"""The only file that knows the order of the stages (the paper's Section 3.5, Algorithm 1 and Section 4.2)."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from basisprune.basis.refit import basis_statistics, rebase
from basisprune.basis.split import decompose
from basisprune.costs import measure
from basisprune.coupling import trace_coupling
from basisprune.data import LabelledImages, PreparedBatches, Splits, load_data, take
from basisprune.errors import ConfigError, DataError
from basisprune.files import write_text
from basisprune.importance import score_filters, taylor_scores
from basisprune.plan import plan_basis, plan_filters
from basisprune.prune import prune_basis, prune_filters
from basisprune.recipes import Recipe, find_recipe
from basisprune.stage_store import RunFolder
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate
from basisprune.training.history import EpochRecord
from basisprune.training.loop import Session, fit
from basisprune.training.predict import predict
from basisprune.training.trainable import classes_of, set_trainable
from basisprune.transfer.model import spec_of
from basisprune.types import OUTPUT, BasisPlan, FilterPlan

Framework: TypeAlias = Literal["baseline", "l1", "taylor", "hrank", "basis", "basis+taylor", "basis+hrank", "basis+l1"]
Enough = Callable[[int, float], bool]
"""Given the passes done since pruning (0 at first) and the validation accuracy: whether tuning may end."""


@dataclass(frozen=True)
class Stage:
    """What a network was at one stage: accuracy on held-out images, and what it costs."""

    name: str
    accuracy: float
    parameters: int
    trainable: int
    macs: int
    history: tuple[EpochRecord, ...] = ()


@dataclass(frozen=True)
class Pruned:
    """The model that a framework made, with its plans; `stages` tell the story, on validation images.

    `test_accuracy` is that of the final model on the test images, None where there are none.
    """

    framework: str
    model: nn.Module
    stages: tuple[Stage, ...]
    plans: tuple[BasisPlan | FilterPlan, ...]
    test_accuracy: float | None

    def save_summary(self, path: str | Path) -> None:
        """Writes all but the model as JSON."""
        summary: dict[str, Any] = {
            "framework": self.framework,
            "test_accuracy": self.test_accuracy,
            "stages": [asdict(stage) for stage in self.stages],
            "plans": [json.loads(plan.to_json()) for plan in self.plans],
        }
        write_text(Path(path), json.dumps(summary, indent=1) + "\n")


@dataclass(frozen=True)
class State:
    """A network under way, with what happened to it so far; `hits` are the validation images it gets right."""

    key: str
    model: nn.Module
    stages: tuple[Stage, ...] = ()
    plans: tuple[BasisPlan | FilterPlan, ...] = ()
    hits: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


@dataclass
class Pipeline:
    """Runs frameworks on one model and one dataset, and trains what they share only once.

    `model` comes from `transfer_model` and is not changed; `data` is anything that `load_data` takes. With
    `checkpoints`, a folder, a run that was killed goes on where it was. `say` gets a line for each step.
    """

    model: nn.Module
    data: Any
    recipe: str | Recipe = "quick"
    checkpoints: str | Path | None = None
    progress: bool | None = None
    say: Callable[[str], None] = lambda _: None
    _starts: dict[str, State] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.settings = find_recipe(self.recipe)
        self.spec = spec_of(self.model)
        self.splits = load_data(self.data, size=self.spec.size)
        self.val, self.scoring = self._judging_and_scoring(self._check_data())
        self.folder = RunFolder(None if self.checkpoints is None else Path(self.checkpoints))

    def run(
        self,
        framework: Framework,
        *,
        basis_ratio: float = 0.5,
        filter_ratio: float = 0.5,
        iterations: int = 1,
    ) -> Pruned:
        """The model that a framework of the paper makes: train, score, prune, train.

        `basis_ratio` is the fraction of all basis vectors removed by the frameworks with a basis,
        `filter_ratio` that of all filters by those that prune filters. With more `iterations`, each pruning is
        done in so many equal steps with training in between.
        """
        _check_framework(framework, iterations)
        self.claim_folder()
        with_basis = framework.startswith("basis")
        method = framework.removeprefix("basis").removeprefix("+")
        state = self.decomposed() if with_basis else self.dense()
        for step in range(iterations if with_basis else 0):
            state = self.prune_basis(state, _step_ratio(basis_ratio, step, iterations))
        for step in range(iterations if method not in ("", "baseline") else 0):
            state = self.prune_filters(state, method, _step_ratio(filter_ratio, step, iterations))
        accuracy = None if self.splits.test is None else self._accuracy(state.model, self.splits.test)
        return Pruned(framework, state.model, state.stages, state.plans, accuracy)

    def dense(self) -> State:
        """The model trained as it is, where all frameworks without a basis start."""
        return self._start("dense", lambda: self.model)

    def decomposed(self) -> State:
        """The model decomposed and trained, where all frameworks with a basis start."""

        def split() -> nn.Module:
            self.say("decomposing every conv")
            return decompose(
                self.model,
                scale_init=self.settings.scale_init,
                basis=self.settings.basis,
                batches=self._basis_batches() if self.settings.basis == "outputs" else None,
            )

        return self._start("decomposed", split)

    def adopt(self, state: State) -> None:
        """Takes over a network that another pipeline trained on the same images, instead of training it here."""
        self._starts[state.key] = state

    def _start(self, key: str, build: Callable[[], nn.Module]) -> State:
        if key not in self._starts:
            self.claim_folder()
            self._starts[key] = self._train(State(key, build()), self.settings.train)
        return self._starts[key]

    def prune_basis(self, state: State, ratio: float, *, enough: Enough | None = None) -> State:
        """The state without the fraction `ratio` of its basis vectors, tuned until it is `enough`."""
        key = f"{state.key}, basis {ratio!r}"
        known = self._starts.get(key)
        if known is not None and self._is_tuned(known, enough):
            return known
        self.say("scoring the basis vectors on the validation images")
        model = rebase(state.model, self._basis_batches()) if self.settings.rebase else state.model
        with self._precision():
            scores = taylor_scores(model, self.scoring_batches())
        plan = self.folder.plan(key, plan_basis(scores, ratio, self.settings.plan))
        self.say(f"removing {plan.removed} of {plan.total} basis vectors")
        how = self.settings.compensate
        statistics = basis_statistics(model, self._basis_batches()) if how == "refit" else None
        pruned = prune_basis(model, plan, compensate=how, statistics=statistics)
        self._starts[key] = self.tune(state, key, pruned, plan, enough=enough)
        return self._starts[key]

    def _is_tuned(self, state: State, enough: Enough | None) -> bool:
        """Whether a network that was tuned for another purpose would be tuned no longer for this one."""
        passes = len(state.stages[-1].history)
        return passes == self.settings.finetune.epochs or (
            enough is not None and enough(passes, state.stages[-1].accuracy)
        )

    def prune_filters(self, state: State, method: str, ratio: float, *, enough: Enough | None = None) -> State:
        """The state without the fraction `ratio` of its filters by the method's scores, tuned until it is `enough`."""
        key = f"{state.key}, {method} {ratio!r}"
        self.say(f"scoring the filters by {method}")
        device = next(state.model.parameters()).device
        coupling = trace_coupling(state.model, torch.zeros(2, *self.spec.shape, device=device))
        # Other scores than Taylor's are the same in batches of any size, and large ones are faster.
        batches = self.scoring_batches() if method == "taylor" else self._batches(self.scoring, shuffle=True)
        with self._precision():
            scores = score_filters(state.model, method, coupling.layers, batches)  # type: ignore[arg-type]
        plan = self.folder.plan(
            key, plan_filters(state.model, scores, ratio, self.settings.filter_plan, coupling=coupling)
        )
        self.say(f"removing {plan.removed} of {plan.total} filters")
        for name, reason in plan.coupling.frozen.items():
            if not name.endswith(".basis") and reason != OUTPUT:
                self.say(f"  {name} keeps its filters: {reason}")
        return self.tune(state, key, prune_filters(state.model, plan), plan, enough=enough)

    def polish(self, state: State) -> State:
        """The state tuned once more, for all epochs of the recipe's fine-tuning."""
        return self._train(replace(state, key=f"{state.key}, polished"), self.settings.finetune)

    def tune(
        self,
        state: State,
        key: str,
        pruned: nn.Module,
        plan: BasisPlan | FilterPlan | None = None,
        *,
        enough: Enough | None = None,
    ) -> State:
        """The network that pruning made of the state's, tuned until it is `enough`; `plan` is how it was pruned."""
        untuned, hits = self._stage(f"{key}, not tuned", pruned)
        plans = state.plans if plan is None else (*state.plans, plan)
        after = State(key, pruned, (*state.stages, untuned), plans, hits)
        if enough is not None and enough(0, untuned.accuracy):
            return after
        return self._train(after, self.settings.finetune, enough)

    def _train(self, state: State, config: TrainConfig, enough: Enough | None = None) -> State:
        self.say(f"{state.key}: training for {config.epochs} epochs")

        def stop(history: Sequence[EpochRecord]) -> bool:
            accuracy = history[-1].val_accuracy
            return enough is not None and accuracy is not None and enough(len(history), accuracy)

        path = self.folder.path(state.key, ".pt")
        # The unpruned network teaches what was made of it.
        start = self._starts.get(state.key.split(", ")[0], self._starts.get("dense"))
        result = fit(
            state.model,
            self.splits.train,
            self.val,
            config,
            checkpoint=path,
            progress=self.progress,
            session=Session(teacher=None if start is None else start.model, stop=stop),
        )
        stage, hits = self._stage(state.key, result.model, result.history)
        return State(state.key, result.model, (*state.stages, stage), state.plans, hits)

    def _stage(
        self, name: str, model: nn.Module, history: tuple[EpochRecord, ...] = ()
    ) -> tuple[Stage, npt.NDArray[np.bool_]]:
        set_trainable(model, scales=self.settings.finetune.train_scales)
        report = measure(model)
        with self._precision():
            hits = predict(model, self.val, prepared=self.settings.train.prepared).hits
        return Stage(name, float(hits.mean()), report.parameters, report.trainable, report.macs, history), hits

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Forward and backward passes outside of `fit` run in bfloat16 where the training does."""
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.settings.train.mixed_precision == "bf16"):
            yield

    def _basis_batches(self) -> PreparedBatches:
        return self._batches(self.splits.train, limit=self.settings.basis_images, shuffle=True)

    def scoring_batches(self) -> PreparedBatches:
        """The validation images that Taylor scores are computed on, in the recipe's batches of mixed classes."""
        return self._batches(self.scoring, batch_size=self.settings.score_batch, shuffle=True)

    def _batches(self, data: LabelledImages, **options: Any) -> PreparedBatches:
        return PreparedBatches(data, self.spec, prepared=self.settings.train.prepared, **options)

    def _accuracy(self, model: nn.Module, data: LabelledImages) -> float:
        return evaluate(model, data, prepared=self.settings.train.prepared).accuracy

    def claim_folder(self) -> None:
        """Notes in the folder what its runs have in common; raises CheckpointError where they had others."""
        if self.folder.root is None:
            return  # fingerprints take their time
        settings = asdict(self.settings)
        names = ("basis", "scale_init", "compensate", "basis_images", "score_images", "score_batch", "rebase")
        common = {name: settings[name] for name in names}
        common |= {"input": asdict(self.spec), "classes": list(self.splits.classes)}
        self.folder.claim(common | {"weights": _weights_digest(self.model), "data": _data_digest(self.splits)})

    def _judging_and_scoring(self, val: LabelledImages) -> tuple[LabelledImages, LabelledImages]:
        """The validation images that judge, and those that give the scores: all for both, or some set apart."""
        if self.settings.score_images is None:
            return val, val
        count = min(self.settings.score_images, len(val) // 2)
        if count == 0:
            raise DataError(f"{len(val)} validation image; score_images needs another one to set apart for the scores")
        order = np.random.default_rng(0).permutation(len(val))
        return take(val, np.sort(order[count:])), take(val, order[:count])

    def _check_data(self) -> LabelledImages:
        """The validation images; raises DataError where there are none, or other classes than the model's."""
        splits, classes = self.splits, classes_of(self.model)
        if classes != splits.num_classes:
            raise DataError(
                f"the data has {splits.num_classes} classes ({', '.join(splits.classes[:5])}, ...), the model "
                f"tells {classes} apart; build it with transfer_model(..., num_classes={splits.num_classes})"
            )
        if splits.val is None:
            raise DataError("the data has no validation images, which the scores need; pass val_fraction > 0")
        return splits.val


def run(
    framework: Framework,
    model: nn.Module,
    data: Any,
    *,
    basis_ratio: float = 0.5,
    filter_ratio: float = 0.5,
    recipe: str | Recipe = "quick",
    iterations: int = 1,
    checkpoints: str | Path | None = None,
) -> Pruned:
    """The model that a framework of the paper makes; see `Pipeline`, which compares several for less."""
    pipeline = Pipeline(model, data, recipe, checkpoints)
    return pipeline.run(framework, basis_ratio=basis_ratio, filter_ratio=filter_ratio, iterations=iterations)


def _weights_digest(model: nn.Module) -> str:
    """A fingerprint of the weights that a run starts from, without the classifier, which may be drawn anew."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("classifier."):
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _data_digest(splits: Splits) -> str:
    """A fingerprint of the split: all labels in their order, and some images of each part."""
    digest = hashlib.sha256()
    for part in (splits.train, splits.val, splits.test):
        if part is not None:
            digest.update(np.asarray(part.labels, dtype=np.int64).tobytes())
            for index in range(0, len(part), max(1, len(part) // 8)):
                digest.update(np.ascontiguousarray(part[index][0]).tobytes())
    return digest.hexdigest()[:16]


def _check_framework(framework: str, iterations: int) -> None:
    allowed = get_args(Framework)
    faults = []
    if framework not in allowed:
        close = difflib.get_close_matches(framework, allowed, n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        faults.append(f"framework: {framework!r} given; allowed are {', '.join(allowed)}{hint}")
    if iterations < 1:
        faults.append(f"iterations: {iterations} given; at least 1 is needed")
    if faults:
        raise ConfigError.of("run", faults)


def _step_ratio(ratio: float, step: int, steps: int) -> float:
    """The fraction of what is left to remove in this step, so that all steps together remove `ratio`.

    >>> [round(_step_ratio(0.5, step, 2), 4) for step in range(2)]
    [0.25, 0.3333]
    """
    return (ratio / steps) / (1 - ratio * step / steps)
