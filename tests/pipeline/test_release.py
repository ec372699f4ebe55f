"""Laws of what is released: wheel and sdist build, hold all that is needed, and run where they are installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import basisprune

ROOT = Path(__file__).parents[2]


def run(*command: object, folder: Path = ROOT) -> str:
    result = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", target, folder=source)
    (built,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the sdist, as package indexes and distributions do."""
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(build("sdist", ROOT, folder / "sdist")) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", next(folder.glob("basisprune-*")), folder / "wheel")


def test_the_wheel_needs_no_compiler(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    package = ROOT / "src" / "basisprune"
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in files if "__pycache__" not in name}


def test_the_wheel_runs_in_an_environment_of_its_own(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    zipfile.ZipFile(wheel).extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # but not this checkout's .pth files
    assert str(site) in run(python, "-I", "-c", "import basisprune; print(basisprune.__file__)", folder=tmp_path)
    command = (python, "-I", "-c", "from basisprune.cli import app; app()")
    assert "compress" in run(*command, "--help", folder=tmp_path)
    assert "parameters" in run(*command, "inspect", "test_resnet", "--size", "32", folder=tmp_path)


def test_the_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == basisprune.__version__
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
