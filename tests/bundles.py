"""Networks at every stage, and bundles that are damaged on purpose."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_decomposed
from torch import Tensor, nn

from basisprune.basis.decompose import decompose
from basisprune.coupling import cut, trace_coupling
from basisprune.deploy.bundle import from_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError
from basisprune.planning import plan_basis
from basisprune.pruning import prune_basis
from basisprune.types import BasisPlan, LayerScores, Scores

NAMES = ["red", "green", "blue"]


def half_basis(model: nn.Module) -> tuple[nn.Module, BasisPlan]:
    pairs = {name: module for name, module in model.named_modules() if type(module).__name__ == "BasisPair"}
    scores = Scores("first", {
        name: LayerScores(tuple(range(pair.rank, 0, -1)), pair.scaling.groups) for name, pair in pairs.items()
    })  # fmt: skip
    plan = plan_basis(scores, 0.4)
    return prune_basis(model, plan), plan


def half_filters(model: nn.Module, x: Tensor) -> nn.Module:
    coupling = trace_coupling(model, x)
    keep = {g.name: tuple(sorted(u for part in g.parts for u in part[: -(-len(part) // 2)])) for g in coupling.groups}
    return cut(model, coupling, keep)


def stages(model: nn.Module, x: Tensor) -> dict[str, nn.Module]:
    decomposed = decompose(model, scale_init=0.7)
    pruned, _ = half_basis(decomposed)
    double = half_filters(pruned, x)
    folded = {f"folded_{prefer}": fold(double, x, prefer) for prefer in ("macs", "none")}
    return {"dense": model, "decomposed": decomposed, "pruned": pruned, "double": double, **folded}


def same(one: nn.Module, other: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(x), other.eval()(x))


def content(folder: Path) -> dict[str, bytes]:
    """All files in the folder, however deep."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, message: str, **options) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        from_pretrained(folder, **options)
    assert str(folder) in str(caught.value)


def rewrite(folder: Path, change=lambda config: None, tensors=lambda state: None) -> None:
    """Changes a bundle as one who knows its checksums would."""
    state = load_file(folder / "model.safetensors")
    tensors(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    seal(folder, change)


def seal(folder: Path, change=lambda config: None) -> None:
    """Makes all checksums right."""
    config = json.loads((folder / "config.json").read_text())
    for name in config["files"]:
        config["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    del config["checksum"]
    change(config)
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    config["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))


def damaged_or_equal(folder: Path) -> bool:
    """Whether the bundle is refused; what is loaded otherwise must be the network that was saved."""
    try:
        loaded = from_pretrained(folder)
    except BundleError:
        return True
    assert same(loaded, tiny_decomposed(), torch.randn(2, 3, 16, 16))
    return False
