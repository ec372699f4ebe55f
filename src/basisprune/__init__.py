"""basisprune: make a pretrained CNN small for your own images.

The public names are imported when they are first used, so that `import basisprune` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basisprune.config import RECIPES as RECIPES
    from basisprune.config import Recipe as Recipe
    from basisprune.config import TrainConfig as TrainConfig
    from basisprune.data import Augment as Augment
    from basisprune.data import PreparedBatches as PreparedBatches
    from basisprune.data import Splits as Splits
    from basisprune.data import load_data as load_data
    from basisprune.data import prepare as prepare
    from basisprune.decompose import choose_layers as choose_layers
    from basisprune.decompose import decompose as decompose
    from basisprune.decompose import recompose as recompose
    from basisprune.errors import BasisPruneError as BasisPruneError
    from basisprune.importance import taylor_scores as taylor_scores
    from basisprune.layers import BasisPair as BasisPair
    from basisprune.layers import BasisScalingConv as BasisScalingConv
    from basisprune.measure import ModelReport as ModelReport
    from basisprune.measure import measure as measure
    from basisprune.pipeline import BasisPruned as BasisPruned
    from basisprune.pipeline import basis_prune as basis_prune
    from basisprune.plan import PlanConfig as PlanConfig
    from basisprune.plan import plan_basis as plan_basis
    from basisprune.prune import prune_basis as prune_basis
    from basisprune.report import layer_table as layer_table
    from basisprune.training import evaluate as evaluate
    from basisprune.training import fit as fit
    from basisprune.training import set_trainable as set_trainable
    from basisprune.transfer import TransferModel as TransferModel
    from basisprune.transfer import transfer_model as transfer_model
    from basisprune.types import BasisPlan as BasisPlan
    from basisprune.types import InputSpec as InputSpec
    from basisprune.types import Scores as Scores

_HOMES = {
    "RECIPES": "config",
    "Augment": "data",
    "BasisPair": "layers",
    "BasisPlan": "types",
    "BasisPruneError": "errors",
    "BasisPruned": "pipeline",
    "BasisScalingConv": "layers",
    "InputSpec": "types",
    "ModelReport": "measure",
    "PlanConfig": "plan",
    "PreparedBatches": "data",
    "Recipe": "config",
    "Scores": "types",
    "Splits": "data",
    "TrainConfig": "config",
    "TransferModel": "transfer",
    "basis_prune": "pipeline",
    "choose_layers": "decompose",
    "decompose": "decompose",
    "evaluate": "training",
    "fit": "training",
    "layer_table": "report",
    "load_data": "data",
    "measure": "measure",
    "plan_basis": "plan",
    "prepare": "data",
    "prune_basis": "prune",
    "recompose": "decompose",
    "set_trainable": "training",
    "taylor_scores": "importance",
    "transfer_model": "transfer",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("basisprune")
    if name not in _HOMES:
        raise AttributeError(f"module 'basisprune' has no attribute {name!r}")
    value = getattr(import_module(f"basisprune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
