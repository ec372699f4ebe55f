"""The coupling of a network: one run with channel labels on every tensor, and trials of the groups on a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, cycle

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from basisprune.basis.layers import BasisPair, BasisScalingConv, half_name
from basisprune.coupling.combining import COMBINING, PRODUCTS, elementwise, shape_only
from basisprune.coupling.cutting import dropped, hollow_cut, shell
from basisprune.coupling.labels import (
    CONSTANT,
    Ids,
    Labels,
    Ledger,
    Operation,
    Rule,
    attach,
    attached,
    listed,
    support,
    vector,
)
from basisprune.coupling.rearranging import REARRANGING
from basisprune.coupling.solving import Solution, build, solve
from basisprune.errors import ModelError, pass_on
from basisprune.torchkit.running import hooked, mode, tensors_in
from basisprune.torchkit.surgery import LayerPatterns, find_layers, match_layers, named_tensors
from basisprune.types import OUTPUT, Coupling, Group

RULES: dict[str, Rule] = {**COMBINING, **REARRANGING, **PRODUCTS}
"""What is known of operations; one that is not here and not element-wise by torch's own tags is unknown."""

_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")


class Tracer(TorchDispatchMode):
    """Carries labels from tensor to tensor while a network runs; products and batch norms give zeros."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.stack: list[tuple[str, tuple[object, ...]]] = []
        self.failing: list[Tensor] = []  # what the running operation reads; after an error, what failed

    def labels_of(self, tensor: Tensor) -> Labels:
        """The labels of a tensor; parameters get theirs when they are first asked for."""
        found = attached(tensor)
        if found is not None:
            return found
        if id(tensor) not in self.ledger.names:
            return CONSTANT
        fields = [vector(ids, dim, tensor.ndim) for dim, ids in enumerate(self.ledger.parameter(tensor))]
        return Labels(tuple(ids for ids in fields if ids.size > 1), active=False)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        self.failing = tensors
        namespace, _, name = func._schema.name.partition("::")
        if namespace != "aten":
            name = func._schema.name
        elif not name.endswith("__"):
            name = name.removesuffix("_")
        out = self._result(func, name, args, kwargs)
        labels = [self.labels_of(tensor) for tensor in tensors]
        if any(label.fields for label in labels):
            module = self.stack[-1][0] if self.stack else ""
            call = Operation(name, func, args, kwargs, out, module, self.ledger, self.labels_of)
            self._mark(out, self._apply(call, labels))
        elif any(label.active for label in labels):
            self._mark(out, Labels((), active=True))
        self.failing = []
        return out

    def _result(
        self, func: OpOverload[..., object], name: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if name in PRODUCTS:
            return shape_only(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _NORMS and first is not None:
            return torch.zeros_like(first), *(first.new_zeros(0) for _ in func._schema.returns[1:])
        if func._schema.is_mutable and first is not None and id(first) in self.ledger.names:
            return first
        return func(*args, **kwargs)

    def _apply(self, call: Operation, labels: list[Labels]) -> Labels | list[Labels]:
        rule: Rule | None = RULES.get(call.name)
        if rule is None and torch.Tag.pointwise in getattr(call.func, "tags", ()):
            rule = elementwise
        if rule is not None:
            return rule(call)
        self.ledger.unknown[str(call.func)] = None
        for label in labels:
            for ids in label.fields:
                self.ledger.freeze(ids, f"it enters {call.func}, which is not known")
        return Labels((), any(label.active for label in labels))

    def _mark(self, out: object, labels: Labels | list[Labels]) -> None:
        results = listed(out)
        each = labels if isinstance(labels, list) else [labels] * len(results)
        for tensor, label in zip(results, each, strict=True):
            if isinstance(tensor, Tensor) and id(tensor) not in self.ledger.names:
                fits = all(ids.ndim == tensor.ndim for ids in label.fields)
                attach(tensor, label if fits else Labels((), label.active))


@contextmanager
def _quiet(model: nn.Module, training: bool) -> Iterator[None]:
    """The network in one mode, without gradients, random state and fused attention; all is put back."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    rng = torch.random.fork_rng(enabled=training)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), rng, mode(model, training=training):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _watched(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Keep the tracer's stack of running modules; after an error the stack shows where it happened."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[object, ...]) -> None:
        tracer.stack.append((names.get(module, ""), args))
        for item in args:
            for ids in tracer.labels_of(item).fields if isinstance(item, Tensor) else ():
                tracer.ledger.hint(tracer.stack[-1][0], ids, support(ids)[-1])

    def leave(*_: object) -> None:
        tracer.stack.pop()

    with hooked([register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]):
        yield


def forward(model: nn.Module, inputs: tuple[Tensor, ...], tracer: Tracer, *, training: bool) -> None:
    """Runs the network under the tracer and freezes what reaches its output; raises what the network raises."""
    # Two examples, or the only one twice: a batch axis of length one would look like no axis.
    images = [example[:2].detach().repeat_interleave(1 if len(example) > 1 else 2, 0) for example in inputs]
    for image in images:
        attach(image, Labels((), active=True))
    with _quiet(model, training), _watched(model, tracer), tracer:
        output = model(*images)
    for result in tensors_in(output):
        for ids in tracer.labels_of(result).fields:
            tracer.ledger.freeze(ids, OUTPUT)


_TRIALS = 200
_FEW = 24  # groups, of which each pair is distinguished


def trace_coupling(
    model: nn.Module, example_inputs: Tensor | Sequence[Tensor], *, ignored_layers: LayerPatterns = ()
) -> Coupling:
    """Find the groups of channels of a network that can be cut, by running it once and by trying them on a copy.

    The network is not changed and may be in any mode. Each group was cut in trials, by other shares than its
    neighbours and without some of them; one that made the network fail, or put channels in each other's place, is
    coupled with those that have to be cut alike, or frozen and named with the reason. The basis
    vectors of a BasisPair are left to basis pruning. Raises ModelError if the network does not run.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> coupling = trace_coupling(net, torch.zeros(1, 3, 8, 8))
    >>> [(group.name, group.size) for group in coupling.groups], dict(coupling.frozen)
    ([('0', 8)], {'3': "it is part of the network's output"})
    """
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    ledger, modes = _first_runs(shell(model), inputs)
    _freeze_uncut(model, ledger, ignored_layers)
    tied: set[str] = set()
    for turn in count(1):
        solution = solve(ledger)
        coupling, numbers = build(model, ledger, solution)
        trial = _Trial(model, inputs, modes, ledger, solution, dict(zip(numbers, coupling.groups, strict=True)))
        fault = next(filter(None, map(trial.run, _cuts(trial.groups))), None)
        if fault is None:
            return coupling
        guilty = trial.guilty_alone(fault)
        partners = _partners(trial.groups, guilty)
        alike = _same_kind(model, ledger, fault.stack) - tied
        if alike:  # the code there may take one number for the lengths of several axes
            ledger.tie(alike)
            tied |= alike
        elif turn >= _TRIALS or not fault.suspects:
            ledger.freeze(np.flatnonzero(solution.group >= 0), fault.reason)
        elif partners:  # each fails without the others: they are cut at the same places from now on
            held = [np.flatnonzero(solution.group == number) for number in partners]
            first, *others = (ids[np.unique(solution.unit[ids], return_index=True)[1]] for ids in held)  # one per unit
            for other in others:
                ledger.unite(first, other)
        else:
            ledger.freeze(np.flatnonzero(solution.group == (guilty or fault.suspects)[0]), fault.reason)
    raise AssertionError("a coupling without groups passes every trial")


def _partners(groups: Mapping[int, Group], guilty: Sequence[int]) -> list[int]:
    """The first of the guilty groups and those that are equally large and of as many parts; empty if there are none."""
    shapes = {number: (groups[number].size, len(groups[number].parts)) for number in guilty}
    found = [number for number in guilty if shapes[number] == shapes[guilty[0]]]
    return found if len(found) > 1 else []


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
    ledger = Ledger(names, mixing=frozenset(name for name, _ in find_layers(model, BasisScalingConv)))
    try:
        forward(model, inputs, Tracer(ledger), training=False)
    except Exception as error:
        pass_on(error)
        raise ModelError(f"{type(model).__name__} does not run on the example inputs: {error}") from error
    before = len(ledger.used)
    if all(p.dim() < 2 or id(p) in ledger.used for p in model.parameters()):
        return ledger, (False,)
    try:
        forward(model, inputs, Tracer(ledger), training=True)
    except Exception as error:  # a network need not be trainable on these inputs; what eval mode showed still holds
        pass_on(error)
        return ledger, (False,)
    return ledger, (False, True) if len(ledger.used) > before else (False,)


def _freeze_uncut(model: nn.Module, ledger: Ledger, ignored_layers: LayerPatterns) -> None:
    """Freeze what is not to be cut: layers that the caller names, and the bases of pairs."""
    ignored = dict.fromkeys(match_layers(model, ignored_layers), "it is ignored as asked")
    for name, _ in find_layers(model, BasisPair):
        ignored.setdefault(half_name(name, "basis"), "its basis vectors belong to basis pruning")
    modules, owner = ledger.owners()
    for flat in map(np.ravel, ledger.produced if ignored else ()):
        for number in np.unique(owner[flat]).tolist():
            if number >= 0 and modules[number] in ignored:
                ledger.freeze(flat[owner[flat] == number], ignored[modules[number]])


def _cuts(groups: Mapping[int, Group]) -> Iterator[dict[int, int]]:
    """How many units each part of each group loses, in one trial after the other.

    First all groups lose some, and of those that are equally large no two neighbours lose as many: code may take for
    granted that they do. Then only some are cut, so that each two of few groups, and neighbours among many, part ways.
    """
    lengths = {number: len(group.parts[0]) for number, group in groups.items()}
    spans = {length: _span(length) for length in lengths.values()}
    turns = {length: cycle(span) for length, span in spans.items()}
    yield {number: next(turns[length]) for number, length in lengths.items()}
    bits = max(2, (len(groups) - 1).bit_length()) if len(groups) <= _FEW else 2
    for bit in range(bits if len(groups) > 1 else 0):
        rng = np.random.default_rng(bit)
        drawn = {number: int(rng.choice(spans[length])) for number, length in lengths.items()}
        yield {number: cut for place, (number, cut) in enumerate(drawn.items()) if place >> bit & 1}


def _span(length: int) -> range:
    """How many of this many units may go in a trial: about a third, and not all but one, which would look like none."""
    return range(max(1, round(0.2 * length)), 1 + max(1, min(round(0.5 * length), length - 2)))


def _trial_units(group: Group, number: int, drop: int) -> tuple[int, ...]:
    """The units of a group that stay if each of its parts loses as many, each other ones."""
    rng = np.random.default_rng(number)
    dropped = {part[place] for part in group.parts for place in rng.permutation(len(part))[:drop].tolist()}
    return tuple(unit for unit in range(group.size) if unit not in dropped)


@dataclass(frozen=True)
class _Fault:
    """Why a trial failed, the modules that were running, and the groups to blame, likeliest first."""

    reason: str
    stack: tuple[str, ...]
    suspects: tuple[int, ...]


class _MisplacedError(Exception):
    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        super().__init__("its channels end up in each other's place when cut")


@dataclass
class _Checked(Ledger):
    """A ledger in which only equal ids may meet, as far as they belong to groups; others raise _MisplacedError."""

    grouped: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    def unite(self, first: Ids, second: Ids) -> None:
        one, other = np.broadcast_arrays(first, second)
        apart = (one != other) & (one != 0) & (other != 0)
        if apart.any():
            met = np.concatenate([one[apart], other[apart]])
            if (self.grouped[met] >= 0).any():
                raise _MisplacedError(met)


@dataclass(frozen=True)
class _Trial:
    """Cuts groups, by their number, of a network on its example inputs, to see whether it then runs."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    modes: tuple[bool, ...]
    ledger: Ledger
    solution: Solution
    groups: Mapping[int, Group]

    def run(self, cuts: Mapping[int, int]) -> _Fault | None:
        """Return what is wrong with the network so cut, traced with its former classes; None if nothing is."""
        groups = {number: self.groups[number] for number in cuts}
        coupling = Coupling(tuple(groups.values()), {}, ())
        keep = {group.name: _trial_units(group, number, cuts[number]) for number, group in groups.items()}
        smaller = hollow_cut(self.model, coupling, keep)
        given = self._kept_classes(smaller, coupling, keep)
        names = {id(tensor): name for name, tensor in named_tensors(smaller)}
        for training in self.modes:
            tracer = Tracer(_Checked(names, given, self.ledger.mixing, grouped=self.solution.group))
            try:
                forward(smaller, self.inputs, tracer, training=training)
            except Exception as error:
                pass_on(error)
                return _fault(tracer, self.solution, self.groups, error)
        return None

    def _kept_classes(
        self, smaller: nn.Module, coupling: Coupling, keep: Mapping[str, Sequence[int]]
    ) -> dict[int, list[Ids]]:
        """The classes of the ids that each parameter of the cut network has kept."""
        gone = np.zeros(self.ledger.count, bool)
        start = {(axis.parameter, axis.dim): axis.start for axis in self.ledger.axes}
        for group in coupling.groups:
            lost = dropped(group, keep)
            for axis in group.axes:
                gone[start[axis.parameter, axis.dim] + np.reshape(axis.index, (group.size, -1))[lost]] = True
        tensors, used = dict(named_tensors(smaller)), self.ledger.used
        return {
            id(tensors[name]): [self.solution.label[ids[~gone[ids]]] for ids in used[id(tensor)]]
            for name, tensor in named_tensors(self.model)
            if id(tensor) in used
        }

    def guilty_alone(self, fault: _Fault) -> list[int]:
        """The suspects that fail when nothing else is cut, or all such groups if no module says who is suspect."""
        numbers = fault.suspects if len(fault.stack) > 1 else tuple(self.groups)
        return [number for number in numbers if self.run({number: max(1, len(self.groups[number].parts[0]) // 3)})]


def _fault(tracer: Tracer, solution: Solution, groups: Mapping[int, Group], error: Exception) -> _Fault:
    """Describe an error, and which groups may be to blame.

    First those that enter the failing operation, then the modules around it; among equals the one with fewest filters.
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
        entering.append({number for number, group in groups.items() if name in _modules(group)})
    for suspects in entering:
        if suspects & weights.keys():
            return _Fault(reason, stack, tuple(sorted(suspects & weights.keys(), key=weights.__getitem__)))
    return _Fault(reason, stack, ())


def _modules(group: Group) -> set[str]:
    return {size.module for size in group.sizes} | {axis.parameter.rpartition(".")[0] for axis in group.axes}


def _numbers(tracer: Tracer, tensors: Sequence[object], solution: Solution) -> set[int]:
    fields = [tracer.labels_of(tensor).fields for tensor in tensors if isinstance(tensor, Tensor)]
    return {number for ids in chain(*fields) for number in np.unique(solution.group[ids]).tolist()}
