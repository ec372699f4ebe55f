"""A folded transfer model: the graph of its plain parts, and the TransferModel of the same parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import fx, nn

from basisprune.errors import LayerError
from basisprune.transfer.model import GlobalPool, ModelSource, TransferModel
from basisprune.types import InputSpec

LAYER_ATTRIBUTES = (
    *("in_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
    *("transposed", "output_padding", "in_features"),
)
"""What the code around a layer may read of it, and a container in its place has too."""


class FoldedModel(fx.GraphModule):
    """What `fold` makes of a TransferModel: a graph of calls of its parts, which keep their names.

    What it knows of itself lies in `about` as plain data. Pickled, it becomes torch's own GraphModule, with that
    data, so that whoever reads it needs torch and whatever package the backbone's blocks come from, not this one.
    """

    about: dict[str, Any]

    @property
    def input_spec(self) -> InputSpec:
        """How it wants its images."""
        return InputSpec(**self.about["input_spec"])

    @property
    def source(self) -> ModelSource:
        """Where its architecture came from."""
        return ModelSource(**self.about["source"])

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of its classes, if it was given any."""
        names: tuple[str, ...] | None = self.about["classes"]
        return names

    @classes.setter
    def classes(self, names: Sequence[str] | None) -> None:
        self.about["classes"] = None if names is None else tuple(names)

    def __deepcopy__(self, memo: dict[int, Any]) -> FoldedModel:
        result: FoldedModel = super().__deepcopy__(memo)  # type: ignore[assignment]
        result.about = copy.deepcopy(self.about, memo)  # torch keeps only what the graph refers to
        return result


class _OuterTracer(fx.Tracer):
    """Looks into the modules of this package only; a backbone's blocks stay as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Whether the module stays a module."""
        return not isinstance(m, (TransferModel, GlobalPool))


def traced(name: str, model: TransferModel) -> FoldedModel:
    """What the model called `name` does, as a graph of its parts, which are shared; raises LayerError if it cannot."""
    try:
        graph = _OuterTracer().trace(model)
    except Exception as error:
        raise LayerError(
            name,
            f"{type(model.backbone).__name__}.forward_features cannot be traced ({error}); give the backbone a "
            "forward_features that only calls modules and torch functions",
        ) from error
    graph._tracer_cls = None  # or a pickle of the result would ask for this class
    result = FoldedModel(model, graph, class_name="FoldedModel")
    result.about = {
        "input_spec": asdict(model.input_spec),
        "source": asdict(model.source or ModelSource(None)),
        "pool": {"layout": model.pool.layout, "prefix_tokens": model.pool.prefix_tokens},
        "classes": None,
    }
    result.classes = getattr(model, "classes", None)
    return result


def untraced(model: FoldedModel, fresh: nn.Module | None) -> TransferModel:
    """A TransferModel that does what the graph does, on the parts of the graph, which are shared.

    A file need not hold a graph then, which would be code: the architecture is traced anew instead. `fresh` is
    that architecture with any weights, and is used up; it is None where the backbone is one part of the graph.
    Raises LayerError if it is not.
    """
    if isinstance(fresh, TransferModel):
        _adopt(fresh, model)
        fresh.input_spec, fresh.source = model.input_spec, model.source
        return fresh.eval()
    parts: dict[str, Any] = dict(model.named_children())
    if type(parts["backbone"]) is nn.Module:
        raise LayerError(
            "backbone",
            "was handed over as a module, and only its parts are left; pass factory='package.module:function' "
            "(or a timm name), which builds it",
        )
    pool = GlobalPool(**model.about["pool"])
    return TransferModel(**parts, pool=pool, input_spec=model.input_spec, source=model.source).eval()


def _adopt(place: nn.Module, graph: nn.Module) -> None:
    """Puts what the graph holds into the place; its containers of type nn.Module only hold names."""
    for name, child in graph.named_children():
        inner = place._modules.get(name)
        if type(child) is nn.Module and inner is not None:
            _adopt(inner, child)
        else:
            setattr(place, name, child)
    place._parameters.update(graph._parameters)
    place._buffers.update(graph._buffers)
