"""What is run: the paper's protocol at full size, and the same at a size that two cores can carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from basisprune import Augment, PlanConfig, Recipe, TrainConfig
from basisprune.budget import Budget
from basisprune.recipes import PAPER_DATASETS, find_recipe
from basisprune.search import SearchConfig

FRAMEWORKS = ("baseline", "l1", "taylor", "hrank", "basis", "basis+taylor", "basis+hrank")
"""The frameworks of the paper's tables, in their order."""

START = "decomposed"
"""The decomposed network, trained and not pruned, where the frameworks with a basis start."""

INSIDE = ("l1 inside blocks", "taylor inside blocks", "hrank inside blocks")
"""Filter pruning that leaves filters alone which skip connections tie together, as the paper's rivals may have been."""

PEERS = ("torch-pruning magnitude", "torch-pruning taylor", "truncated svd")
"""What people use instead: the widely used pruning library, and a singular value decomposition by hand."""

ROWS = (FRAMEWORKS[0], START, *FRAMEWORKS[1:], *INSIDE, *PEERS)
"""All that is run on each network and dataset."""

VARIANTS: dict[str, Callable[[Recipe], Recipe]] = {
    "default": lambda recipe: recipe,
    "paper": lambda recipe: replace(
        recipe, basis="weights", compensate="none", score_batch=128, plan=PlanConfig(normalise="max", min_share=0.0)
    ),
    "weights": lambda recipe: replace(recipe, basis="weights"),
    "mean": lambda recipe: replace(recipe, compensate="mean"),
    "no compensation": lambda recipe: replace(recipe, compensate="none"),
    "max normalised": lambda recipe: replace(recipe, plan=replace(recipe.plan, normalise="max")),
    "per parameter": lambda recipe: replace(recipe, plan=replace(recipe.plan, per="parameter")),
    "per multiply-add": lambda recipe: replace(recipe, plan=replace(recipe.plan, per="mac")),
    "scores by 128": lambda recipe: replace(recipe, score_batch=128),
    "rebase": lambda recipe: replace(recipe, rebase=True),
    "longer": lambda recipe: replace(recipe, finetune=replace(recipe.finetune, epochs=2 * recipe.finetune.epochs)),
    "distill": lambda recipe: replace(recipe, finetune=replace(recipe.finetune, distill=0.5)),
}
"""What the ablations change in the recipe, one thing at a time; "paper" is the paper's way to plan on its
basis, with the same training and scaling factors at first as the others."""


@dataclass(frozen=True)
class Protocol:
    """One size of the experiments: which networks and images, how they are trained, and how the search goes.

    `images`, `val_images` and `test_images` are how many of each are used, None for all. `side` is that of the
    enlarged images in pixels.
    """

    name: str
    models: tuple[str, ...]
    images: int | None
    val_images: int | None
    test_images: int | None
    search: SearchConfig
    side: Callable[[str], int]
    recipe: Callable[[str], Recipe]
    budget: Callable[[str], Budget]

    def describe(self, dataset: str) -> dict[str, Any]:
        """The settings for a dataset as JSON values."""
        from dataclasses import asdict

        return {
            "images": self.images,
            "val_images": self.val_images,
            "test_images": self.test_images,
            "side": self.side(dataset),
            "recipe": asdict(self.recipe(dataset)),
            "search": {name: value for name, value in asdict(self.search).items() if name != "framework"},
            "budget": asdict(self.budget(dataset)),
        }


MINI_TRAINING = TrainConfig(
    epochs=8,
    batch_size=32,
    optimizer="adamw",
    lr=3e-3,
    min_lr=3e-5,
    norm_statistics="fixed",
    augmentation=Augment(shift=0.05),
    mixed_precision="bf16",
)
MINI_RECIPE = Recipe(
    basis="outputs",
    scale_init=1.0,
    compensate="refit",
    train=MINI_TRAINING,
    finetune=replace(MINI_TRAINING, epochs=2),
    score_batch=8,
    score_images=500,
)
"""The basis of the outputs and Taylor scores, with norms, scales and classifier trained as in the paper."""


PROTOCOLS = {
    "full": Protocol(
        name="full",
        models=("vgg16", "densenet121", "resnet50"),
        images=None,
        val_images=None,
        test_images=None,
        search=SearchConfig(warm_start=False, tune_fully=True, polish=False, tolerance=0.1, smallest=0.005),
        side=lambda dataset: PAPER_DATASETS[dataset][0],
        recipe=lambda dataset: find_recipe(f"paper:{dataset}"),
        budget=lambda dataset: Budget(min_accuracy=0.99) if dataset == "mnist" else Budget(max_drop=0.01),
    ),
    "mini": Protocol(
        name="mini",
        models=("resnet50", "vgg16"),
        images=2000,
        val_images=2500,
        test_images=2000,
        search=SearchConfig(),
        side=lambda _: 64,
        recipe=lambda _: MINI_RECIPE,
        budget=lambda _: Budget(max_drop=0.01),
    ),
}
"""The presets: `full` is the paper's own protocol, for a machine with a GPU; `mini` is for two cores."""
