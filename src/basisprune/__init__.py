"""basisprune: make a pretrained CNN small for your own images.

The public names are listed in `__init__.pyi` and imported when they are first used, so that `import basisprune` is
quick. The functions among them look at the types of what they are given first.
"""

from types import FunctionType

import lazy_loader

_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("basisprune")
    value = _public_name(name)
    if name not in __all__ or not isinstance(value, FunctionType):
        return value
    from basisprune.arguments import takes

    globals()[name] = takes(value)  # found there the next time
    return globals()[name]
