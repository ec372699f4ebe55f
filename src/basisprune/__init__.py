"""basisprune: make a pretrained CNN small for your own images.

The public names are listed in `__init__.pyi` and imported when they are first used, so that `import basisprune` is
quick. The functions among them look at the types of what they are given first.
"""

from types import FunctionType

import lazy_loader

from basisprune.moved import MOVED

_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("basisprune")
    value = _moved(name) if name in MOVED else _public_name(name)
    if name not in __all__ or not isinstance(value, FunctionType):
        return value
    from basisprune.arguments import takes

    globals()[name] = takes(value)  # found there the next time
    return globals()[name]


def _moved(name: str) -> object:
    """Return what was public until this release, from its submodule, with a warning that names it."""
    import warnings
    from importlib import import_module

    home, new = f"basisprune.{MOVED[name]}", {"export_for": "export"}.get(name, name)
    warnings.warn(f"basisprune.{name} goes: use {home}.{new}", DeprecationWarning, stacklevel=3)
    return getattr(import_module(home), new)
