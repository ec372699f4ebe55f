"""basisprune: make a pretrained CNN small for your own images.

The public names are listed in `__init__.pyi` and imported when they are first used, so that `import basisprune` is
quick.
"""

import lazy_loader

_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("basisprune")
    return _public_name(name)
