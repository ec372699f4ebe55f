"""Laws of where a network says that its classifier is."""

from __future__ import annotations

import timm
from tiny import tiny_model
from torch import nn

from basisprune.torchkit.heads import model_heads


def test_heads_are_what_the_network_names():
    model = tiny_model()
    assert model_heads(model) == [model.classifier]
    assert model_heads(nn.Sequential(nn.Linear(3, 2))) == []
    vit = timm.create_model("test_vit", num_classes=3)
    assert model_heads(vit) == [vit.head]


def test_a_network_with_two_heads_names_both():
    model = timm.create_model("efficientformer_l1", depths=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_classes=3)
    assert model_heads(model) == [model.head, model.head_dist]
