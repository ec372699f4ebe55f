"""Networks beyond classifiers, from the split to ONNX: maps, volumes, signals, boxes; whatever they output."""

from __future__ import annotations

import onnx
import pytest
import torch
from dense_networks import DENSE, RawDetector
from torch import Tensor, nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import basis_pairs
from basisprune.coupling import trace_coupling
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.deploy.export import export_onnx
from basisprune.deploy.fold import fold
from basisprune.importance import score_filters, taylor_scores
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.torchkit.running import relative_difference, tensors_in

NAMES = {
    "signals": ["output0", "output1"],
    "fcn": ["out", "aux"],
    "deeplab": ["out"],
    "detector": [f"{kind}.{level}" for kind in ("maps", "objectness", "deltas") for level in range(3)],
}
"""What the ONNX graph calls outputs that are not one tensor."""


def outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [leaf.clone() for leaf in tensors_in(model.eval()(images))]


def assert_same(expected: list[Tensor], found: list[Tensor], tolerance: float) -> None:
    assert len(expected) == len(found) > 0
    for one, other in zip(expected, found, strict=True):
        assert relative_difference(one, other) <= tolerance


def any_loss(output: object, _labels: Tensor) -> Tensor:
    return torch.stack([leaf.square().mean() for leaf in tensors_in(output) if leaf.is_floating_point()]).sum()


@pytest.mark.parametrize("name", DENSE)
def test_a_network_is_split_exactly_pruned_twice_folded_saved_and_exported(name, tmp_path):
    model, images = DENSE[name]()
    expected = outputs(model, images)
    pairs = decompose(model, scale_init=1.0)
    assert_same(expected, outputs(pairs, images), 1e-10)

    batches = [(images, torch.zeros(len(images)))]
    plan = plan_basis(taylor_scores(pairs, batches, loss=any_loss), 0.5)
    slim = prune_basis(pairs, plan)
    assert plan.fraction_removed == pytest.approx(0.5, abs=0.01)

    coupling = trace_coupling(slim, images)
    scores = score_filters(slim, "l1", coupling.layers)
    filters = plan_filters(slim, scores, 0.3, coupling=coupling)
    smaller = prune_filters(slim, filters)
    assert filters.fraction_removed == pytest.approx(0.3, abs=0.05)
    assert sum(part.numel() for part in smaller.parameters()) < sum(part.numel() for part in model.parameters())

    folded = fold(smaller, images)
    assert_same(outputs(smaller, images), outputs(folded, images), 1e-9)
    assert not any("basisprune" in type(part).__module__ for part in folded.modules())

    save_pretrained(folded, tmp_path / "bundle", factory=f"dense_networks:{name}", input_shape=images.shape[1:])
    loaded = load_bundle(tmp_path / "bundle", factory=f"dense_networks:{name}").model
    assert_same(outputs(folded, images), outputs(loaded, images), 0.0)

    plain = RawDetector(folded) if name == "detector" else folded
    report = export_onnx(plain.float(), tmp_path / "network.onnx", example_inputs=images.float())
    assert report.difference < 1e-4
    made = [output.name for output in onnx.load(report.path).graph.output]
    assert made == NAMES.get(name, ["scores"])


def test_heads_necks_and_transposed_convs_are_split_and_pruned():
    for name, layers in {
        "unet": ("up.0", "join.1.3"),
        "vnet": ("up", "deep.convs.3"),
        "deeplab": ("classifier.0.convs.1.0", "classifier.0.project.0"),
        "detector": ("backbone.fpn.inner_blocks.0.0", "rpn.head.conv.0.0", "roi_heads.box_head.fc6"),
    }.items():
        model, images = DENSE[name](dtype=torch.float32)
        pairs = decompose(model, scale_init=1.0)
        assert set(layers) <= basis_pairs(pairs).keys()
        coupling = trace_coupling(pairs, images)
        assert {f"{layer}.scaling" for layer in layers} <= set(coupling.layers), coupling.frozen
