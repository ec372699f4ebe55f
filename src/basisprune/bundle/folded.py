"""A folded transfer model, which is a graph of calls, as the TransferModel of the same parts, and back."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from basisprune.errors import BundleError
from basisprune.fold import trace_parts
from basisprune.transfer import TransferModel


def untraced(model: nn.Module, like: nn.Module | None) -> TransferModel:
    """A TransferModel that does what the graph does: `like`, in place, with the parts of the graph in it.

    A file need not hold a graph then, which would be code; the architecture is traced anew instead. The parts
    are shared, not copied. Raises BundleError for a graph that does not come from a transfer model.
    """
    if not isinstance(like, TransferModel):
        raise BundleError(
            "a torch.fx graph can only be saved if it was folded from a network of transfer_model; "
            "pass like= that network"
        )
    _adopt(like, model)
    return like.eval()


def traced(model: TransferModel) -> GraphModule:
    """The graph of the model's parts, as `fold` makes it."""
    return trace_parts("", model)


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
