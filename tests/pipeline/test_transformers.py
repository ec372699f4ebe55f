"""Transformers and hybrids: linear layers are split, heads are cut evenly, widths are pruned, all is exported."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from basisprune.basis.decompose import choose_layers, decompose
from basisprune.basis.layers import basis_pairs
from basisprune.coupling import trace_coupling
from basisprune.deploy.export import export_onnx
from basisprune.deploy.fold import fold
from basisprune.importance import basis_loss, score_filters, taylor_scores
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.types import FilterPlan

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (
        lambda: timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5
        ),
        32,
    ),
    "swin": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=32, window_size=4, embed_dim=24, depths=(2, 1), num_heads=(2, 4),
            num_classes=5,
        ),
        32,
    ),
    "efficientformer": (
        lambda: timm.create_model(
            "efficientformer_l1", depths=(1, 1, 1, 2), embed_dims=(8, 16, 24, 32), num_classes=5
        ),
        224,
    ),
    "mobilevit": (lambda: timm.create_model("mobilevit_xxs", num_classes=5), 64),
    "convnext": (lambda: timm.create_model("test_convnext", num_classes=5), 64),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, Tensor]:
    build, side = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double().eval(), torch.randn(2, 3, side, side, dtype=torch.float64)


def pruned(model: nn.Module, images: Tensor) -> tuple[nn.Module, FilterPlan]:
    """The model split, without half of its basis vectors and 30% of its filters; and the plan of the latter."""
    pairs = decompose(model, scale_init=1.0)
    scores = taylor_scores(pairs, [(images, torch.tensor([0, 1]))] * 2)  # some keep their attention biases in eval mode
    slim = prune_basis(pairs, plan_basis(scores, 0.5))
    coupling = trace_coupling(slim, images)
    plan = plan_filters(slim, score_filters(slim, "l1", coupling.layers), 0.3, coupling=coupling)
    return prune_filters(slim, plan), plan


@pytest.mark.parametrize("name", NETWORKS)
def test_a_transformer_is_split_exactly_pruned_twice_folded_and_exported(name, tmp_path):
    model, images = built(name)
    with torch.no_grad():
        torch.testing.assert_close(decompose(model, scale_init=1.0)(images), model(images), rtol=1e-10, atol=1e-10)
        smaller, plan = pruned(model, images)
        assert plan.fraction_removed == pytest.approx(0.3, abs=0.02)
        folded = fold(smaller, images)
        torch.testing.assert_close(folded(images), smaller(images), rtol=1e-9, atol=1e-9)
    before, after = (sum(part.numel() for part in net.parameters()) for net in (model, folded))
    assert after < 0.7 * before
    assert export_onnx(folded.float(), tmp_path / "n.onnx", example_inputs=images.float()).difference < 1e-4


@pytest.mark.parametrize(("name", "share"), [("vit", 0.9), ("swin", 0.9), ("mobilevit", 0.9), ("convnext", 0.85)])
def test_linear_layers_are_split_where_they_hold_a_notable_share(name, share):
    model, _ = built(name)
    pairs = basis_pairs(decompose(model))
    assert sum(pair.weight.numel() for pair in pairs.values()) > share * sum(p.numel() for p in model.parameters())
    left = {choice.name: choice.left_alone for choice in choose_layers(model) if choice.left_alone}
    assert left.pop("head" if name == "vit" else "head.fc") == "the classifier: it is trained as it is"
    assert set(left.values()) <= {"depthwise: a split gains nothing"}


def test_linear_layers_that_hold_little_stay_and_settings_overrule():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Flatten(), nn.Linear(32, 2), nn.ReLU(), nn.Linear(2, 4))
    reasons = {choice.name: choice.left_alone for choice in choose_layers(model)}
    assert reasons["2"] == "linear layers hold less than 10% of the weights"
    assert reasons["4"] == "the classifier: it is trained as it is"
    assert basis_pairs(decompose(model)).keys() == {"0"}
    assert basis_pairs(decompose(model, linear=False)).keys() == {"0"}
    assert basis_pairs(decompose(model, linear=True)).keys() == {"0", "2", "4"}
    with pytest.raises(ValueError, match="linear: 'some' given; allowed are True, False and 'auto'"):
        decompose(model, linear="some")


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_queries_keys_and_values_lose_equally_many_channels_of_every_head_and_widths_of_the_mlp_shrink(name):
    model, images = built(name)
    smaller, plan = pruned(model, images)
    attention = "blocks.0.attn" if name == "vit" else "layers.0.blocks.0.attn"
    heads = model.get_submodule(attention).num_heads
    rows = model.get_submodule(attention).qkv.out_features
    removed = np.zeros(rows, dtype=bool)
    for group in plan.coupling.groups:
        for axis in group.axes:
            if (axis.parameter, axis.dim) == (f"{attention}.qkv.scaling.weight", 0):
                index = np.asarray(axis.index).reshape(group.size, -1)
                gone = [unit for unit in range(group.size) if unit not in plan.groups[group.name].keep]
                removed[index[gone].ravel()] = True
    by_head = removed.reshape(3, heads, -1).sum(-1)
    assert removed.any()
    assert (by_head == by_head[0, 0]).all()
    assert (removed.reshape(3, -1)[0] == removed.reshape(3, -1)[1]).all()  # a query meets the key at its place
    fc1 = attention.replace("attn", "mlp.fc1")
    assert smaller.get_submodule(fc1).out_features < model.get_submodule(fc1).out_features
    assert smaller.get_submodule(attention).num_heads == heads


def attentions() -> dict[str, nn.Module]:
    """Networks whose attention reads the weights of its linear layers without calling them."""
    encoder = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 48, num_classes=3)
    nn.init.normal_(encoder.heads.head.weight)
    shifted = torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=3)
    return {"MultiheadAttention": encoder, "ShiftedWindowAttention": shifted}


@pytest.mark.parametrize("name", ["MultiheadAttention", "ShiftedWindowAttention"])
@pytest.mark.parametrize("basis", ["weights", "loss"])
def test_linear_layers_that_are_read_without_a_call_are_not_pruned_and_fold_back(name, basis):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, images = attentions()[name].double().eval(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    batches = [(images, torch.tensor([0, 1]))]
    pairs = decompose(model, scale_init=1.0, basis=basis, batches=None if basis == "weights" else batches)
    torch.testing.assert_close(pairs(images), model(images), rtol=1e-8, atol=1e-8)
    scores = taylor_scores(pairs, batches) if basis == "weights" else basis_loss(pairs, batches).scores
    bypassed = [layer for layer in basis_pairs(decompose(model)) if layer.endswith(("out_proj", "qkv", "attn.proj"))]
    assert bypassed
    assert not set(bypassed) & scores.layers.keys()
    slim = prune_basis(pairs, plan_basis(scores, 0.5))
    folded = fold(slim, images)
    torch.testing.assert_close(folded(images), slim(images), rtol=1e-8, atol=1e-8)
    assert all(isinstance(folded.get_submodule(layer), nn.Linear) for layer in bypassed)


def test_a_detection_transformer_runs_whatever_is_cut_from_its_cross_attention():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 4, "num_labels": 3}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
        encoder_ffn_dim=24, decoder_ffn_dim=24, **sizes, **heads,
    )  # fmt: skip
    model, images = transformers.DetrForObjectDetection(config).eval(), torch.randn(2, 3, 32, 32)
    coupling = trace_coupling(model, images)
    assert any(".encoder_attn." in layer for layer in coupling.layers)
    for ratio in (0.1, 0.3, 0.5, 0.65):
        plan = plan_filters(model, score_filters(model, "random", coupling.layers), ratio, coupling=coupling)
        assert prune_filters(model, plan)(images).logits.shape == (2, 4, 4)
