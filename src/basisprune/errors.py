"""Everything basisprune raises on purpose.

    BasisPruneError
    ├── ConfigError          (ValueError)     settings that are wrong; all faults are listed at once
    ├── DataError            (ValueError)     images or labels that cannot be used; names the file
    ├── ModelError           (ValueError)     a network that cannot be taken as it is
    │   └── LayerError                        one layer of it; the message starts with its name
    ├── PlanError            (ValueError)     a plan or scores that do not fit the network
    │   └── TooMuchError                      a ratio that removes more than can go
    ├── CheckpointError      (ValueError)     a file of ours that is damaged or belongs to another run
    ├── BundleError          (ValueError)     a saved network that cannot be written, or trusted when read
    ├── TrainingError        (RuntimeError)   a training that cannot continue
    ├── ProcessError         (RuntimeError)   another process of the same run has gone
    └── MissingExtraError    (ImportError)    an optional package is needed; the message names the extra

Each is also the matching builtin, so that code which knows nothing of basisprune can catch it. A message
says where, what was given, what is allowed and what to do. Code reads `where` and `faults`, people the message, which
is made of them in one place.
"""

from __future__ import annotations

import difflib
import errno
import unicodedata
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from pydantic import ValidationError

_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode
MOST_FAULTS = 1000  # that one error holds
_MOST_LINES = 20
_MOST_LETTERS = 4000  # of a message with one fault; of each in a list, a fifth
_OF_THE_SYSTEM = frozenset(
    getattr(errno, f"E{name}", 0)  # not every system has them all
    for name in ("MFILE", "NFILE", "NOMEM", "NOBUFS", "NOSPC", "DQUOT", "IO", "STALE", "TIMEDOUT", "ACCES", "PERM")
)
_OF_MEMORY = (  # what allocators of C++, oneDNN, CUDA, its libraries and Windows say
    *("allocate", "out of memory", "not enough memory", "insufficient memory", "bad_alloc", "bad allocation"),
    *("alloc_failed", "could not create a primitive", "could not create a memory"),
)


class BasisPruneError(Exception):
    """The base of every error that basisprune raises on purpose: the `faults` found, and `where`.

    >>> error = ConfigError("epochs: 0 given, at least 1 is needed", "lr: -1 given", where="TrainConfig")
    >>> print(error)
    TrainConfig: 2 faults
      - epochs: 0 given, at least 1 is needed
      - lr: -1 given
    >>> error.faults[1]
    'lr: -1 given'
    """

    listed_as: ClassVar[str] = "faults"
    """What the message calls them where there are several."""

    def __init__(self, *faults: str, where: str = "") -> None:
        self.where = where
        self.faults = faults[:MOST_FAULTS]
        super().__init__(*self.faults)

    @classmethod
    def of(cls, where: str, faults: Iterable[str]) -> Self:
        """One error that lists the faults found in `where`; of very many, the first."""
        return cls(*islice(faults, MOST_FAULTS), where=where)

    def __str__(self) -> str:
        return self.text()

    def text(self, shown: Callable[[str], str] = str) -> str:
        """What happened, with the place and each fault as `shown` gives them."""
        where = shown(self.where)
        if len(self.faults) == 1:
            fault = shown(_shortened(self.faults[0], _MOST_LETTERS))
            return f"{where}: {fault}" if where else fault
        many = "or more " if len(self.faults) == MOST_FAULTS else ""
        head = f"{len(self.faults)} {many}{self.listed_as}"
        listed = [shown(_shortened(fault, _MOST_LETTERS // 5)) for fault in self.faults[:_MOST_LINES]]
        lines = [f"{where}: {head}" if where else head, *listed]
        if len(self.faults) > _MOST_LINES:
            lines.append(f"and {len(self.faults) - _MOST_LINES} more")
        return "\n  - ".join(lines)


class ConfigError(BasisPruneError, ValueError):
    """Settings that are wrong; lists all their faults at once.

    >>> str(ConfigError.of("TrainConfig", ["epochs: 0 given, at least 1 is needed"]))
    'TrainConfig: epochs: 0 given, at least 1 is needed'
    """


class DataError(BasisPruneError, ValueError):
    """Images or labels that cannot be used."""


class ModelError(BasisPruneError, ValueError):
    """A network that cannot be taken as it is."""


class LayerError(ModelError):
    """One layer that cannot be handled; the message starts with the layer's name.

    >>> str(LayerError("layer2.0.conv1", "rank 96 exceeds the maximum 64; pass rank<=64"))
    'layer2.0.conv1: rank 96 exceeds the maximum 64; pass rank<=64'
    """

    def __init__(self, layer: str, message: str) -> None:
        super().__init__(message, where=layer or "(root module)")
        self.args = (layer, message)  # what a pickle of it calls the class with
        self.layer = layer


class PlanError(BasisPruneError, ValueError):
    """A plan or scores that do not fit the network."""


class TooMuchError(PlanError):
    """A pruning ratio that asks for more than can be removed; a smaller one may do."""


class CheckpointError(BasisPruneError, ValueError):
    """A file of ours that is damaged, or that belongs to another run; lists what differs."""

    listed_as = "differences"


class BundleError(BasisPruneError, ValueError):
    """A saved network that cannot be written, or that is damaged or does not fit when it is read."""


class TrainingError(BasisPruneError, RuntimeError):
    """A training that cannot continue."""


class ProcessError(BasisPruneError, RuntimeError):
    """Another process of the same run has ended or does not answer."""


class MissingExtraError(BasisPruneError, ImportError):
    """An optional package is missing.

    >>> str(MissingExtraError("mlflow", extra="mlflow"))
    "the package 'mlflow' is needed for this; install it with: pip install 'basisprune[mlflow]'"
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package!r} is needed for this; install it with: pip install 'basisprune[{extra}]'"
        )
        self.args = (package, extra)  # what a pickle of it calls the class with


def broken_rules(settings: object, *rules: tuple[str, Callable[[Any], bool], str]) -> list[str]:
    """List the fields that break a rule: their names, what a value must be, and that in words.

    None breaks no rule of a field that may be None by its annotation, and every rule of another.

    >>> from types import SimpleNamespace
    >>> broken_rules(SimpleNamespace(epochs=0), ("epochs", lambda value: value > 0, "at least 1 is needed"))
    ['epochs: 0 given, at least 1 is needed']
    """
    faults, kinds = [], getattr(type(settings), "__annotations__", {})
    for names, fits, needed in rules:
        for name in names.split():
            value = getattr(settings, name)
            if not ("None" in str(kinds.get(name)) if value is None else fits(value)):
                shown = f"{value:.3g}" if isinstance(value, int) and abs(value) > 10**20 else repr(value)
                faults.append(f"{name}: {shown} given, {needed}")
    return faults


def faults_of_json(error: ValidationError) -> list[str]:
    """What pydantic found in JSON, each with its place; of very many only their number, as each takes memory."""
    if (count := error.error_count()) > MOST_FAULTS:
        return [f"{count:,} faults"]
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = (".".join(printable(step)[:60] for step in each["loc"][:12]) for each in found)
    said = (each["msg"].removeprefix("Value error, ") for each in found)
    return [": ".join(filter(None, pair)) for pair in zip(places, said, strict=True)]


def is_about_memory(error: BaseException) -> bool:
    """Whether the error says that memory is short; PyTorch has no type for it, and each of its libraries its own words.

    >>> is_about_memory(RuntimeError("could not create a primitive")), is_about_memory(ValueError("allocate"))
    (True, False)
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or any(words in said for words in _OF_MEMORY)


def is_about_system(error: BaseException) -> bool:
    """Whether the error tells of the machine and its limits (memory, open files, disks, permissions), not of a file.

    >>> is_about_system(OSError(errno.EMFILE, "Too many open files")), is_about_system(OSError("image is truncated"))
    (True, False)
    """
    return is_about_memory(error) or (isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM)


def pass_on(error: BaseException, where: object = None) -> None:
    """Raise the error again if it tells of the machine, naming where if nothing is named; otherwise do nothing."""
    if not is_about_system(error):
        return
    if isinstance(error, OSError) and error.filename is None and where is not None:
        error.filename = str(where)
    raise error


def printable(text: object) -> str:
    """The text on one line, with escapes for what a terminal acts on: control codes, line ends, changes of direction.

    >>> print(printable("cat\\x1b[2J\\nerror: none"))
    cat\\x1b[2J\\nerror: none
    """
    return "".join(
        letter.encode("unicode_escape").decode() if unicodedata.category(letter) in _UNPRINTABLE else letter
        for letter in str(text)
    )


def _shortened(text: str, most: int) -> str:
    """The text without its middle, if it is very long; the advice is at the end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def nearest(name: str, allowed: Iterable[str], *, most: int = 1) -> str:
    """A hint at the allowed names that were probably meant, whatever their case; empty where none is near.

    >>> nearest("tylor", ["taylor", "l1"])
    " Did you mean 'taylor'?"
    >>> nearest("cifar1", ["CIFAR10", "CIFAR100", "MNIST"], most=3)
    " Did you mean 'CIFAR10' or 'CIFAR100'?"
    """
    known = {each.lower(): each for each in allowed}
    close = [repr(known[each]) for each in difflib.get_close_matches(name.lower(), known, n=most)]
    return f" Did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}?" if close else ""
