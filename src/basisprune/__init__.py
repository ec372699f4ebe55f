"""basisprune: make a pretrained CNN small for your own images.

The public names are listed in `__init__.pyi` and imported when they are first used, so that `import basisprune` is
quick. The functions among them look at the types of what they are given first.
"""

import sys

# With `python -m basisprune`, Python looks into the current folder first, where a stranger's modules may lie.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].partition(".")[0].endswith("basisprune"):
    del sys.path[: 0 if sys.flags.safe_path else 1]

from types import FunctionType

import lazy_loader

from basisprune.moved import MOVED
from basisprune.torchkit.imports import import_others_elsewhere

import_others_elsewhere()
_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_moved_name, _, _ = lazy_loader.attach(__name__, submod_attrs=MOVED)
_PLACES = {name: place for place, names in MOVED.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("basisprune")
    if name in _PLACES:
        import warnings

        said = f"basisprune.{name} goes: use basisprune.{_PLACES[name]}.{name}"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
    value = _moved_name(name) if name in _PLACES else _public_name(name)
    if name not in (*__all__, *_PLACES) or not isinstance(value, FunctionType):
        return value
    from basisprune.signatures import checked

    globals()[name] = value if hasattr(value, "__wrapped__") else checked(value)  # found there the next time
    return globals()[name] if name in __all__ else globals().pop(name)  # which warns again
