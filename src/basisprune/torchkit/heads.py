"""Where a network says that its classifier is."""

from __future__ import annotations

from torch import nn


def model_heads(model: nn.Module) -> list[nn.Module]:
    """What the model names as its classifier: its `classifier`, or what timm's `get_classifier` gives; else nothing.

    >>> model_heads(nn.Sequential(nn.Linear(3, 2)))
    []
    """
    found = getattr(model, "classifier", None)
    if not isinstance(found, nn.Module) and callable(named := getattr(model, "get_classifier", None)):
        found = named()
    several = found if isinstance(found, tuple | list) else [found]  # networks that learn from a teacher have two
    return [head for head in several if isinstance(head, nn.Module)]
