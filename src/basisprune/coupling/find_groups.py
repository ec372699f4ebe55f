"""The coupling of a network, tried out on a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, BasisScalingConv, half_name
from basisprune.coupling.assembling import build
from basisprune.coupling.cutting import hollow_cut, shell
from basisprune.coupling.labelled_run import Tracer, forward
from basisprune.coupling.ledger import Ids, Ledger
from basisprune.coupling.solving import Solution, solve
from basisprune.errors import ModelError, pass_on
from basisprune.torchkit.surgery import LayerPatterns, find_layers, match_layers, named_tensors
from basisprune.types import Coupling, Group

_TRIALS = 200


def trace_coupling(
    model: nn.Module, example_inputs: Tensor | Sequence[Tensor], *, ignored_layers: LayerPatterns = ()
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
    ledger, modes = _first_runs(shell(model), inputs)
    _set_aside(model, ledger, ignored_layers)
    tied: set[str] = set()
    for turn in count(1):
        solution = solve(ledger)
        coupling, numbers = build(model, ledger, solution)
        fault = _try(model, inputs, modes, ledger, solution, coupling, numbers)
        if fault is None:
            return coupling
        if len(fault.stack) < 2:  # in the code between the modules: nothing there says which group it was
            guilty = _guilty_alone(partial(_try, model, inputs, modes, ledger, solution), coupling, numbers)
            fault = replace(fault, suspects=guilty or fault.suspects)
        alike = _same_kind(model, ledger, fault.stack) - tied
        if alike:  # the code there may take one number for the lengths of several axes
            ledger.tie(alike)
            tied |= alike
        elif turn >= _TRIALS or not fault.suspects:
            ledger.freeze(np.flatnonzero(solution.group >= 0), fault.reason)
        else:
            ledger.freeze(np.flatnonzero(solution.group == fault.suspects[0]), fault.reason)
    raise AssertionError("a coupling without groups passes every trial")


def _guilty_alone(
    attempt: Callable[[Coupling, list[int]], _Fault | None], coupling: Coupling, numbers: list[int]
) -> tuple[int, ...]:
    """The groups that fail when nothing else is cut."""
    return tuple(
        number
        for number, group in zip(numbers, coupling.groups, strict=True)
        if attempt(replace(coupling, groups=(group,)), [number]) is not None
    )


def _same_kind(model: nn.Module, ledger: Ledger, stack: Sequence[str]) -> set[str]:
    """The innermost running module that knows lengths of axes, and all of its class."""
    knowing = {hint.module for hint in ledger.hints}
    for name in reversed(stack[-2:]):
        module = model.get_submodule(name)
        if name in knowing and not isinstance(module, nn.modules.conv._ConvNd):
            return {name for name, other in model.named_modules() if type(other) is type(module)} & knowing
    return set()


def _first_runs(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Ledger, tuple[bool, ...]]:
    """The ledger of a run in eval mode, and of one in training mode if that reaches more layers."""
    names = {id(tensor): name for name, tensor in reversed(list(named_tensors(model)))}
    ledger = Ledger(names, mixing=_second_halves(model))
    try:
        forward(model, inputs, Tracer(ledger), training=False)
    except Exception as error:
        pass_on(error)
        raise ModelError(f"{type(model).__name__} does not run on the example inputs: {error}") from error
    weights = [p for p in model.parameters() if p.dim() > 1 and id(p) not in ledger.used]
    if not weights:
        return ledger, (False,)
    before = len(ledger.used)
    try:
        forward(model, inputs, Tracer(ledger), training=True)
    except Exception as error:  # a network need not be trainable on these inputs; what eval mode showed still holds
        pass_on(error)
        return ledger, (False,)
    return ledger, (False, True) if len(ledger.used) > before else (False,)


def _second_halves(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in find_layers(model, BasisScalingConv))


def _set_aside(model: nn.Module, ledger: Ledger, ignored_layers: LayerPatterns) -> None:
    """Freezes what is not to be cut: layers that the caller names, and the bases of pairs."""
    ignored = dict.fromkeys(match_layers(model, ignored_layers), "it is ignored as asked")
    for name, _ in find_layers(model, BasisPair):
        ignored.setdefault(half_name(name, "basis"), "its basis vectors belong to basis pruning")
    if not ignored:
        return
    modules, owner = ledger.owners()
    for ids in ledger.produced:
        flat = ids.ravel()
        for number in np.unique(owner[flat]).tolist():
            if number >= 0 and modules[number] in ignored:
                ledger.freeze(flat[owner[flat] == number], ignored[modules[number]])


def _trial_units(group: Group, number: int) -> tuple[int, ...]:
    """About two thirds of a group's units, other ones in each of its parts."""
    rng = np.random.default_rng(number)
    length = len(group.parts[0])
    drop = max(1, min(length - 1, round(length * rng.uniform(0.2, 0.5))))
    dropped = {part[place] for part in group.parts for place in rng.permutation(length)[:drop].tolist()}
    return tuple(unit for unit in range(group.size) if unit not in dropped)


@dataclass(frozen=True)
class _Fault:
    """Why a trial failed, the modules that were running, and the groups to blame, likeliest first."""

    reason: str
    stack: tuple[str, ...]
    suspects: tuple[int, ...]


class _MisplacedError(Exception):
    """Two channels met that are not the same."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        super().__init__("its channels end up in each other's place when cut")


@dataclass
class _Checked(Ledger):
    """A ledger in which only equal ids may meet, as far as they belong to groups."""

    grouped: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    def unite(self, first: Ids, second: Ids) -> None:
        """Raises if ids at equal positions differ."""
        one, other = np.broadcast_arrays(first, second)
        apart = (one != other) & (one != 0) & (other != 0)
        if apart.any():
            met = np.concatenate([one[apart], other[apart]])
            if (self.grouped[met] >= 0).any():
                raise _MisplacedError(met)


def _try(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    modes: tuple[bool, ...],
    ledger: Ledger,
    solution: Solution,
    coupling: Coupling,
    numbers: list[int],
) -> _Fault | None:
    """Nothing if the network runs with every group cut and all channels in place; else what is wrong.

    The cut network is traced again with the classes that its channels had before: wherever two meet they
    must be the same.
    """
    by_number = dict(zip(numbers, coupling.groups, strict=True))
    keep = {group.name: _trial_units(group, number) for number, group in by_number.items()}
    smaller = hollow_cut(model, coupling, keep)
    given = _kept_classes(model, smaller, ledger, solution, coupling, keep)
    names = {id(tensor): name for name, tensor in named_tensors(smaller)}
    for training in modes:
        tracer = Tracer(_Checked(names, given, ledger.mixing, grouped=solution.group))
        try:
            forward(smaller, inputs, tracer, training=training)
        except Exception as error:
            pass_on(error)
            return _fault(tracer, solution, by_number, error)
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


def _fault(tracer: Tracer, solution: Solution, groups: dict[int, Group], error: Exception) -> _Fault:
    """What an error says, and which groups may be to blame.

    Those come first that enter the failing operation, then those that enter the innermost module or
    belong to it, and so on outwards; among equals the one with the fewest filters.
    """
    stack = tuple(name for name, _ in tracer.stack)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    where = f"cutting it fails in {(stack or ('',))[-1] or 'the network'}: "
    reason = lines[0] if isinstance(error, _MisplacedError) else where + lines[0]
    weights = {number: sum(group.filters.values()) for number, group in groups.items()}
    entering: list[set[int]] = [_numbers(tracer, tracer.failing, solution)]
    if isinstance(error, _MisplacedError):
        entering = [set(solution.group[error.ids].tolist())]
    for name, args in reversed(tracer.stack):
        entering.append(_numbers(tracer, args, solution))
        entering.append({number for number, group in groups.items() if _belongs(group, name)})
    for suspects in entering:
        if suspects & weights.keys():
            return _Fault(reason, stack, tuple(sorted(suspects & weights.keys(), key=weights.__getitem__)))
    return _Fault(reason, stack, ())


def _belongs(group: Group, module: str) -> bool:
    return any(size.module == module for size in group.sizes) or any(
        axis.parameter.rpartition(".")[0] == module for axis in group.axes
    )


def _numbers(tracer: Tracer, tensors: Sequence[object], solution: Solution) -> set[int]:
    """The groups whose channels are in some tensors."""
    fields = [
        ids.ravel() for tensor in tensors if isinstance(tensor, Tensor) for ids in tracer.labels_of(tensor).fields
    ]
    return {number for ids in fields for number in np.unique(solution.group[ids]).tolist()}
