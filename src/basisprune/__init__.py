"""basisprune: make a pretrained CNN small for your own images.

The public names are imported when they are first used, so that `import basisprune` is quick.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basisprune.bundle import from_pretrained as from_pretrained
    from basisprune.bundle import load_bundle as load_bundle
    from basisprune.bundle import push_to_hub as push_to_hub
    from basisprune.bundle import save_pretrained as save_pretrained
    from basisprune.compress import Compressed as Compressed
    from basisprune.compress import compress as compress
    from basisprune.config import RECIPES as RECIPES
    from basisprune.config import Recipe as Recipe
    from basisprune.config import TrainConfig as TrainConfig
    from basisprune.coupling import Coupling as Coupling
    from basisprune.coupling import trace_coupling as trace_coupling
    from basisprune.data import Augment as Augment
    from basisprune.data import PreparedBatches as PreparedBatches
    from basisprune.data import Splits as Splits
    from basisprune.data import load_data as load_data
    from basisprune.data import prepare as prepare
    from basisprune.decompose import choose_layers as choose_layers
    from basisprune.decompose import decompose as decompose
    from basisprune.decompose import recompose as recompose
    from basisprune.errors import BasisPruneError as BasisPruneError
    from basisprune.export import evaluate_onnx as evaluate_onnx
    from basisprune.export import export_onnx as export_onnx
    from basisprune.export import export_program as export_program
    from basisprune.fold import fold as fold
    from basisprune.importance import score_filters as score_filters
    from basisprune.importance import taylor_scores as taylor_scores
    from basisprune.latency import LatencyReport as LatencyReport
    from basisprune.latency import measure_latency as measure_latency
    from basisprune.layers import BasisPair as BasisPair
    from basisprune.layers import BasisScalingConv as BasisScalingConv
    from basisprune.measure import ModelReport as ModelReport
    from basisprune.measure import measure as measure
    from basisprune.pipeline import Pipeline as Pipeline
    from basisprune.pipeline import Pruned as Pruned
    from basisprune.pipeline import run as run
    from basisprune.plan import PlanConfig as PlanConfig
    from basisprune.plan import plan_basis as plan_basis
    from basisprune.plan import plan_filters as plan_filters
    from basisprune.predict import Predictions as Predictions
    from basisprune.predict import predict as predict
    from basisprune.prune import prune_basis as prune_basis
    from basisprune.prune import prune_filters as prune_filters
    from basisprune.refit import basis_statistics as basis_statistics
    from basisprune.refit import rebase as rebase
    from basisprune.report import framework_table as framework_table
    from basisprune.report import layer_table as layer_table
    from basisprune.search import Budget as Budget
    from basisprune.search import SearchConfig as SearchConfig
    from basisprune.training import evaluate as evaluate
    from basisprune.training import fit as fit
    from basisprune.training import set_trainable as set_trainable
    from basisprune.transfer import TransferModel as TransferModel
    from basisprune.transfer import transfer_model as transfer_model
    from basisprune.types import BasisPlan as BasisPlan
    from basisprune.types import FilterPlan as FilterPlan
    from basisprune.types import InputSpec as InputSpec
    from basisprune.types import Scores as Scores

_HOMES = {
    "Augment": "data",
    "BasisPair": "layers",
    "BasisPlan": "types",
    "BasisPruneError": "errors",
    "BasisScalingConv": "layers",
    "Budget": "search",
    "Compressed": "compress",
    "Coupling": "coupling",
    "FilterPlan": "types",
    "InputSpec": "types",
    "LatencyReport": "latency",
    "ModelReport": "measure",
    "Pipeline": "pipeline",
    "PlanConfig": "plan",
    "Predictions": "predict",
    "PreparedBatches": "data",
    "Pruned": "pipeline",
    "RECIPES": "config",
    "Recipe": "config",
    "Scores": "types",
    "SearchConfig": "search",
    "Splits": "data",
    "TrainConfig": "config",
    "TransferModel": "transfer",
    "basis_statistics": "refit",
    "choose_layers": "decompose",
    "compress": "compress",
    "decompose": "decompose",
    "evaluate": "training",
    "evaluate_onnx": "export",
    "export_onnx": "export",
    "export_program": "export",
    "fit": "training",
    "fold": "fold",
    "framework_table": "report",
    "from_pretrained": "bundle",
    "layer_table": "report",
    "load_bundle": "bundle",
    "load_data": "data",
    "measure": "measure",
    "measure_latency": "latency",
    "plan_basis": "plan",
    "plan_filters": "plan",
    "predict": "predict",
    "prepare": "data",
    "prune_basis": "prune",
    "prune_filters": "prune",
    "push_to_hub": "bundle",
    "rebase": "refit",
    "recompose": "decompose",
    "run": "pipeline",
    "save_pretrained": "bundle",
    "score_filters": "importance",
    "set_trainable": "training",
    "taylor_scores": "importance",
    "trace_coupling": "coupling",
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


class _Package(ModuleType):
    """This package: where a function has the name of its file, as `decompose` has, the name means the function.

    Python binds every file that is imported to its name here, whoever imports it first.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in _HOMES:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
