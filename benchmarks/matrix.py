"""One network of the matrix from start to end; `coverage.py --all` runs it for all of them, each in its own process.

`coverage.py --stacks` does the same for the networks of other libraries in `matrix_stacks.py`, see `examine_stack`.

A record says for every step whether it holds, and if not, why: `exact` (decomposed in float64, the largest relative
error), `basis` (half of the basis vectors removed, folded, saved as a bundle and loaded again), `double` (then 30 %
of the filters removed, run in eval and training mode, folded) and `onnx` (the result exported, equal in onnxruntime).
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matrix_networks
import timm
import torch
from matrix_networks import MOST_PARAMETERS, SHORTENED, SMALLEST, RawDetector, torchvision_network
from torch import Tensor, nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import basis_pairs
from basisprune.coupling import trace_coupling
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.deploy.export import export_onnx
from basisprune.deploy.fold import fold
from basisprune.errors import BasisPruneError, ModelError
from basisprune.importance import score_filters, taylor_scores
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.torchkit.running import packed, relative_difference, tensors_in
from basisprune.transfer.backbones import build_backbone
from basisprune.transfer.model import transfer_model
from basisprune.transfer.several import SeveralInputs

Record = dict[str, Any]
BASIS_RATIO, FILTER_RATIO = 0.5, 0.3
_EXACT = 1e-7
_CLASSES = 10


class _SkippedError(Exception):
    """Why a network is left out."""


def examine(library: str, name: str) -> Record:
    """The record of one network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: Record = {"seconds": {}}
    try:
        with _timed(record, "build"):
            model, images, factory = _built(library, name, record)
    except _SkippedError as skipped:
        return {**record, "skipped": str(skipped)}
    except Exception as error:
        return {**record, "build": _why(error)}
    steps = _Steps(model, images, factory, record)
    for step in (steps.exact, steps.basis, steps.double, steps.onnx):
        with _timed(record, step.__name__):
            try:
                record[step.__name__] = True
                step()
            except Exception as error:
                record[step.__name__] = _why(error)
    return record


def examine_stack(library: str, name: str) -> Record:
    """The record of one network of another library: split, pruned, folded, and its bundle without a word of how."""
    from matrix_stacks import NETWORKS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: Record = {"seconds": {}}
    with _timed(record, "build"):
        try:
            model, given = NETWORKS[f"{library}/{name}"]()
            images: Tensor = given if isinstance(given, Tensor) else packed(given)
            model = model.eval() if images is given else SeveralInputs.of(model, given).eval()
            record["parameters"] = _count(model)
        except Exception as error:
            return {**record, "build": _why(error)}
    steps = _StackSteps(model, images, None, record)
    for step in (steps.exact, steps.filters, steps.fold, steps.bundle):
        with _timed(record, step.__name__):
            try:
                record[step.__name__] = True
                step()
            except Exception as error:
                record[step.__name__] = _why(error)
    return record


class _Steps:
    """The steps in their order; each leaves behind what the next one needs."""

    def __init__(self, model: nn.Module, images: Tensor, factory: str | None, record: Record) -> None:
        self.model, self.images, self.factory, self.record = model, images, factory, record
        self.pairs: nn.Module | None = None
        self.pruned: nn.Module | None = None
        self.folded: nn.Module | None = None

    def exact(self) -> None:
        """Decomposed, the output is unchanged."""
        precise = copy.deepcopy(self.model).double()
        images: Tensor = self.images.double()
        try:
            expected = _run(copy.deepcopy(precise), images)  # some keep tensors of this precision for the next run
        except RuntimeError:  # its code makes float32 tensors on the way
            precise, images = precise.float(), self.images
            expected = _run(copy.deepcopy(precise), images)
        pairs = decompose(precise, scale_init=1.0)
        error = _difference(expected, _run(copy.deepcopy(pairs), images))
        self.record["error"], self.record["precision"] = error, str(images.dtype).removeprefix("torch.")
        self.record["layers"] = len(basis_pairs(pairs))
        held = sum(pair.weight.numel() for pair in basis_pairs(pairs).values())
        self.record["share"] = round(held / self.record["parameters"], 3)
        if error > (_EXACT if images.dtype == torch.float64 else 1e-3):
            raise AssertionError(f"the output changes by {error:.2g} when decomposed")
        self.pairs = pairs.float()

    def basis(self) -> None:
        """Half of the basis vectors go, then it is folded, saved and loaded."""
        pairs = _needed(self.pairs)
        scores = taylor_scores(pairs, self._batches(), loss=_loss)
        plan = plan_basis(scores, BASIS_RATIO)
        self.pruned = prune_basis(pairs, plan)
        self.record["vectors_removed"] = round(plan.fraction_removed, 3)
        self.folded = self._folded(self.pruned, "basis")

    def double(self) -> None:
        """30 % of the filters go too; the result runs in both modes, is folded, saved and loaded."""
        pruned = _needed(self.pruned)
        coupling = trace_coupling(pruned, self.images)
        scores = score_filters(pruned, "l1", coupling.layers)
        plan = plan_filters(pruned, scores, FILTER_RATIO, coupling=coupling)
        smaller = prune_filters(pruned, plan)
        self.record["filters_removed"] = round(plan.fraction_removed, 3)
        expected, found = ([tuple(leaf.shape) for leaf in _run(net, self.images)] for net in (self.model, smaller))
        if expected != found:
            raise AssertionError(f"outputs {found[:3]} instead of {expected[:3]}")
        _check_training(copy.deepcopy(smaller), self.images)
        self.folded = self._folded(smaller, "double")

    def onnx(self) -> None:
        """The smallest network so far is equal in onnxruntime."""
        with TemporaryDirectory() as folder:
            report = export_onnx(_needed(self.folded), Path(folder) / "network.onnx", example_inputs=self.images)
        self.record["onnx_difference"] = report.difference

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.images, torch.arange(len(self.images)) % _CLASSES)]

    def _folded(self, model: nn.Module, step: str) -> nn.Module:
        folded = fold(model, self.images)
        self.record[f"{step}_fold_error"] = _difference(_run(model, self.images), _run(folded, self.images))
        self.record[f"{step}_parameters"] = sum(part.numel() for part in folded.parameters())
        with TemporaryDirectory() as folder:
            save_pretrained(folded, folder, factory=self.factory, input_shape=self.images.shape[1:])
            loaded = load_bundle(folder, trust_remote_code=True).model
        if _difference(_run(folded, self.images), _run(loaded, self.images)) != 0:
            raise AssertionError("the bundle holds another network")
        return folded


class _StackSteps(_Steps):
    """The steps of the second table. What follows a failed step starts from the network before it."""

    def filters(self) -> None:
        """30 % of the filters go, and the result runs with the same shapes."""
        coupling = trace_coupling(self.model, self.images)
        scores = score_filters(self.model, "l1", coupling.layers)
        plan = plan_filters(self.model, scores, FILTER_RATIO, coupling=coupling)
        smaller = prune_filters(self.model, plan)
        expected, found = ([tuple(leaf.shape) for leaf in _run(net, self.images)] for net in (self.model, smaller))
        if expected != found:
            raise AssertionError(f"outputs {found[:3]} instead of {expected[:3]}")
        self.record["filters_removed"] = round(plan.fraction_removed, 3)
        self.pruned = smaller

    def fold(self) -> None:
        """Folded, the output is unchanged, but for rounding."""
        network = self.pruned or self.model
        self.folded = fold(network, self.images)
        self.record["fold_error"] = error = _difference(_run(network, self.images), _run(self.folded, self.images))
        if error > 1e-3:
            raise AssertionError(f"the output changes by {error:.2g} when folded")

    def bundle(self) -> None:
        """Saved with nothing but the shape of an input, and loaded: first as a stranger would, then with trust."""
        folded = self.folded or self.model.requires_grad_(False)
        with TemporaryDirectory() as folder:
            save_pretrained(folded, folder, input_shape=self.images.shape[1:])
            try:
                loaded = load_bundle(folder).model
                self.record["bundle_form"] = "graph"
            except BasisPruneError:
                loaded = load_bundle(folder, trust_remote_code=True).model
                self.record["bundle_form"] = "class"
        if _difference(_run(folded, self.images), _run(loaded, self.images)) != 0:
            raise AssertionError("the bundle holds another network")


def _built(library: str, name: str, record: Record) -> tuple[nn.Module, Tensor, str | None]:
    """The network for a new task, or as it is where it is no classifier; its images; what builds it anew."""
    if library == "timm":
        return _classifier(name, f"matrix_networks:{name}" if name in SHORTENED else name, record)
    if name in torchvision_names_of("classification"):
        _refuse_giant(torchvision_network(name), record)
        return _classifier(name, f"matrix_networks:{name}", record)
    model = torchvision_network(name).eval()
    _refuse_giant(model, record)
    side = 320 if name.startswith("ssd") else 160 if isinstance(model, RawDetector) else 96
    record |= {"head": "kept", "image": side}
    return model, torch.rand(2, 3, side, side), f"matrix_networks:{name}"


def _classifier(name: str, factory: str, record: Record) -> tuple[nn.Module, Tensor, str | None]:
    """A transfer model on the smallest images that it takes; the network as it is where that cannot be."""
    try:
        return _transfer(name, factory, record)
    except ModelError as error:
        record |= {"head": "kept", "transfer": str(error)[:300]}
    model = build_backbone(factory)
    side = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))[-1]
    images = torch.randn(2, 3, side, side)
    _refuse_giant(model, record)
    _check_training(copy.deepcopy(model), images)
    record["image"] = side
    return model, images, factory


def _transfer(name: str, factory: str, record: Record) -> tuple[nn.Module, Tensor, str | None]:
    faults = []
    default = 224
    if name not in torchvision_names_of("classification") or ":" not in factory:
        default = timm.get_pretrained_cfg(name).input_size[-1]
    for side in dict.fromkeys((*(size for size in SMALLEST if size <= default), default)):
        try:
            model = transfer_model(factory, _CLASSES, input_size=side)
            images = torch.randn(2, *model.input_spec.shape)
            _check_training(copy.deepcopy(model), images)
        except Exception as error:
            faults.append(error)
            continue
        _refuse_giant(model, record)
        record |= {"head": "transfer", "image": side, "parameters": _count(model)}
        return model.eval(), images, None
    raise faults[-1]


def torchvision_names_of(task: str) -> set[str]:
    """The names of torchvision's networks for the task."""
    return {name for kind, name in matrix_networks.torchvision_names() if kind == task}


def _refuse_giant(model: nn.Module, record: Record) -> None:
    record["parameters"] = _count(model)
    if record["parameters"] > MOST_PARAMETERS:
        raise _SkippedError(
            f"{record['parameters'] / 1e6:.0f} million parameters, more than {MOST_PARAMETERS / 1e6:.0f}"
        )


def _count(model: nn.Module) -> int:
    return sum(part.numel() for part in model.parameters())


@torch.no_grad()
def _run(model: nn.Module, images: Tensor) -> list[Tensor]:
    return [leaf.clone() for leaf in tensors_in(model.eval()(images))]


def _loss(output: object, labels: Tensor) -> Tensor:
    """Cross entropy for classes, otherwise the mean square of all that comes out."""
    if isinstance(output, Tensor) and output.dim() == 2:
        return nn.functional.cross_entropy(output, labels)
    return torch.stack([leaf.square().mean() for leaf in tensors_in(output) if leaf.is_floating_point()]).sum()


def _check_training(model: nn.Module, images: Tensor) -> None:
    """Raises unless the network runs forward and backward in training mode; it is used up."""
    output = model.requires_grad_(True).train()(images)
    torch.stack([leaf.square().mean() for leaf in tensors_in(output)]).sum().backward()


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    return max(relative_difference(one, other) for one, other in zip(expected, found, strict=True))


def _needed(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise AssertionError("an earlier step failed")
    return model


def _why(error: Exception) -> str:
    kind = "" if isinstance(error, BasisPruneError | AssertionError) else f"{type(error).__name__}: "
    said = re.sub(r"/\S*/", "", str(error)).strip()[:400]  # without the folders of this machine
    return f"{kind}{said or 'no words'}"


@contextmanager
def _timed(record: Record, step: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        record["seconds"][step] = round(time.perf_counter() - start, 1)
