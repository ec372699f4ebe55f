"""A page for the browser beside a bundle: it classifies a photo with the ONNX file, without torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from basisprune.deploy.bundle.loading import Bundle
from basisprune.deploy.export import export_onnx
from basisprune.errors import BasisPruneError, BundleError
from basisprune.files import digest, read_bytes

ONNX, APP, REQUIREMENTS = "model.onnx", "app.py", "requirements.txt"
_PACKAGES = ("gradio", "numpy", "onnxruntime", "pillow")


def page_files(bundle: Bundle, folder: Path | None, *, wanted: bool | None) -> dict[str, bytes]:
    """The files of the page: the network as ONNX, the program, and the packages that it needs; by name.

    The ONNX file is the one beside the bundle's folder if its run noted that checksum, or else made from the network.
    No file holds anything of the bundle's but that one, from which the program reads the names of the classes. Raises
    BundleError where there is no ONNX file and none can be made, if `wanted`; if that is None, there is no page then.
    """
    if wanted is False:
        return {}
    try:
        model = _delivered(bundle, folder) or _made(bundle)
    except BasisPruneError as error:
        if wanted is None:
            return {}
        raise BundleError(f"the page cannot be made: {error}") from error
    program = resources.files(__package__).joinpath("templates/app.py.txt").read_bytes()
    return {ONNX: model, APP: program, REQUIREMENTS: "".join(f"{name}\n" for name in _PACKAGES).encode()}


def _delivered(bundle: Bundle, folder: Path | None) -> bytes | None:
    """The ONNX file that the run of the bundle delivered with it, if it is there and sound."""
    sums = bundle.metrics.get("sha256")
    noted = sums.get(ONNX) if isinstance(sums, dict) else None
    if folder is None or noted is None:
        return None
    try:
        content = read_bytes(folder.resolve().parent / ONNX)
    except OSError:
        return None
    return content if digest(content) == noted else None


def _made(bundle: Bundle) -> bytes:
    if bundle.input_spec is None:
        raise BundleError("the network does not know how its images are prepared; save one with an input_spec")
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / ONNX
        export_onnx(bundle.model, path, classes=bundle.classes, preprocess=True, input_spec=bundle.input_spec)
        return path.read_bytes()
