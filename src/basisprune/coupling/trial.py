"""The coupling of a network, tried out on a copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor, nn

from basisprune.coupling.building import build, owners
from basisprune.coupling.cutting import shared_cut
from basisprune.coupling.groups import Coupling, Group
from basisprune.coupling.ledger import Ids, Ledger
from basisprune.coupling.solving import Solution, solve
from basisprune.coupling.tracing import Tracer, forward, named_tensors
from basisprune.errors import ModelError

_ROUNDS = 200


def trace_coupling(
    model: nn.Module, example_inputs: Tensor | Sequence[Tensor], *, ignored_layers: Iterable[str] = ()
) -> Coupling:
    """The groups of channels of a network that can be cut, found by running it once and tried on a copy.

    The network is not changed and may be in any mode. Each group was cut in the trial; one that made the
    network fail, or put channels in each other's place, is frozen and named with the reason. The basis
    vectors of a BasisPair are left to basis pruning. Raises ModelError if the network does not run.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> coupling = trace_coupling(net, torch.zeros(1, 3, 8, 8))
    >>> [(group.name, group.size) for group in coupling.groups], dict(coupling.frozen)
    ([('0', 8)], {'3': "it is part of the network's output"})
    """
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    ledger, modes = _first_runs(model, inputs)
    _set_aside(model, ledger, ignored_layers)
    for _ in range(_ROUNDS):
        solution = solve(ledger)
        coupling, numbers = build(model, ledger, solution)
        fault = _try(model, inputs, modes, ledger, solution, coupling, numbers)
        if fault is None:
            return coupling
        number, reason = fault
        held = solution.group >= 0 if number is None else solution.group == number
        ledger.freeze(np.flatnonzero(held), reason)
    raise ModelError(f"no coupling of {type(model).__name__} could be cut in {_ROUNDS} trials")


def _first_runs(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Ledger, tuple[bool, ...]]:
    """The ledger of a run in eval mode, and of one in training mode if that reaches more layers."""
    names = {id(tensor): name for name, tensor in reversed(list(named_tensors(model)))}
    ledger = Ledger(names)
    try:
        forward(model, inputs, Tracer(ledger), training=False)
    except Exception as error:
        raise ModelError(f"{type(model).__name__} does not run on the example inputs: {error}") from error
    weights = [p for p in model.parameters() if p.dim() > 1 and id(p) not in ledger.used]
    if not weights:
        return ledger, (False,)
    before = len(ledger.used)
    try:
        forward(model, inputs, Tracer(ledger), training=True)
    except Exception:  # a network need not be trainable on these inputs; what eval mode showed still holds
        return ledger, (False,)
    return ledger, (False, True) if len(ledger.used) > before else (False,)


def _set_aside(model: nn.Module, ledger: Ledger, ignored_layers: Iterable[str]) -> None:
    """Freezes what is not to be cut: layers that the caller names, and the bases of pairs."""
    ignored = dict.fromkeys(ignored_layers, "it is ignored as asked")
    unknown = ignored.keys() - {name for name, _ in model.named_modules()}
    if unknown:
        raise ModelError(f"ignored_layers: {', '.join(sorted(unknown))}: no such module")
    for name, module in model.named_modules():
        if type(module).__name__ == "BasisPair":
            ignored.setdefault(f"{name}.basis" if name else "basis", "its basis vectors belong to basis pruning")
    if not ignored:
        return
    held = owners(ledger)
    for ids in ledger.produced:
        flat = ids.ravel()
        for name in {held[one] for one in flat.tolist()} & ignored.keys():
            ledger.freeze(flat[[held[one] == name for one in flat.tolist()]], ignored[name])


def _trial_units(group: Group, number: int) -> tuple[int, ...]:
    """About two thirds of a group's units, other ones in each of its parts."""
    rng = np.random.default_rng(number)
    length = len(group.parts[0])
    drop = max(1, min(length - 1, round(length * rng.uniform(0.2, 0.5))))
    dropped = {part[place] for part in group.parts for place in rng.permutation(length)[:drop].tolist()}
    return tuple(unit for unit in range(group.size) if unit not in dropped)


def _try(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    modes: tuple[bool, ...],
    ledger: Ledger,
    solution: Solution,
    coupling: Coupling,
    numbers: list[int],
) -> tuple[int | None, str] | None:
    """Nothing if the network runs with every group cut and all channels in place; else a group to freeze.

    The cut network is traced again with the classes that its channels had before: wherever two meet they
    must be the same.
    """
    if not coupling.groups:
        return None
    keep = {
        group.name: _trial_units(group, number) for group, number in zip(coupling.groups, numbers, strict=True)
    }
    smaller = shared_cut(model, coupling, keep)
    given = _kept_classes(model, smaller, ledger, solution, coupling, keep)
    names = {id(tensor): name for name, tensor in named_tensors(smaller)}
    sizes = {number: sum(group.filters.values()) for group, number in zip(coupling.groups, numbers, strict=True)}
    for training in modes:
        again = Ledger(names, given)
        tracer = Tracer(again)
        try:
            forward(smaller, inputs, tracer, training=training)
        except Exception as error:
            return _culprit(tracer, solution, sizes, error)
        for first, second in again.unions:
            one, other = np.broadcast_arrays(first, second)
            apart = (one != other) & (one != 0) & (other != 0)
            if apart.any():
                met = np.concatenate([one[apart], other[apart]])
                return _smallest(met, solution, sizes), "its channels end up in each other's place when cut"
    return None


def _kept_classes(
    model: nn.Module,
    smaller: nn.Module,
    ledger: Ledger,
    solution: Solution,
    coupling: Coupling,
    keep: dict[str, tuple[int, ...]],
) -> dict[int, list[Ids]]:
    """The classes of the ids that each parameter of the cut network has kept."""
    dropped = np.zeros(ledger.count, bool)
    start = {(axis.parameter, axis.dim): axis.start for axis in ledger.axes}
    for group in coupling.groups:
        gone = np.ones(group.size, bool)
        gone[list(keep[group.name])] = False
        for axis in group.axes:
            index = np.asarray(axis.index).reshape(group.size, -1)[gone]
            dropped[start[axis.parameter, axis.dim] + index.ravel()] = True
    tensors = dict(named_tensors(smaller))
    given = {}
    for name, tensor in named_tensors(model):
        if id(tensor) in ledger.used:
            given[id(tensors[name])] = [solution.label[ids[~dropped[ids]]] for ids in ledger.used[id(tensor)]]
    return given


def _culprit(
    tracer: Tracer, solution: Solution, sizes: dict[int, int], error: Exception
) -> tuple[int | None, str]:
    """The group to blame for an error: one that enters the failing operation, or the modules around it."""
    where = tracer.stack[-1][0] if tracer.stack else ""
    lines = str(error).strip().splitlines()
    reason = f"cutting it fails in {where or 'the network'}: {lines[0] if lines else type(error).__name__}"
    suspects: list[Sequence[object]] = [tracer.failing, *(args for _, args in reversed(tracer.stack))]
    for tensors in suspects:
        fields = [
            ids.ravel() for tensor in tensors if isinstance(tensor, Tensor) for ids in tracer.labels_of(tensor).fields
        ]
        number = _smallest(np.concatenate([np.zeros(1, np.int64), *fields]), solution, sizes)
        if number is not None:
            return number, reason
    return None, reason


def _smallest(ids: Ids, solution: Solution, sizes: dict[int, int]) -> int | None:
    found = [number for number in np.unique(solution.group[ids]).tolist() if number in sizes]
    return min(found, key=sizes.__getitem__) if found else None
