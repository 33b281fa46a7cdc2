"""The source distribution and the wheel are whole, and the wheel works where there is no
compiler.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[2]
BUILT = (
    *(".git", ".venv", "build", "dist", "runs", "out", "*.egg-info", "*.so", "__pycache__"),
    *(".*_cache", ".hypothesis", "bench-venv"),
)
"""What a checkout may hold that is no source."""
BUILD = "import sys\nfrom setuptools import build_meta\nprint(build_meta.build_{kind}(sys.argv[1]))"


def build(kind: str, source: Path, output: Path) -> Path:
    """Build a `wheel` or an `sdist` without the network, without isolation and without a
    compiler.
    """
    no_compiler = {"CC": shutil.which("false") or "false", "CXX": shutil.which("false") or "false"}
    command = [sys.executable, "-c", BUILD.format(kind=kind), str(output)]
    built = subprocess.run(
        command,
        cwd=source,
        env=os.environ | no_compiler,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return output / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    directory = tmp_path_factory.mktemp("sdist")
    shutil.copytree(
        ROOT, directory / "checkout", ignore=shutil.ignore_patterns(*BUILT), symlinks=True
    )
    return build("sdist", directory / "checkout", directory)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution alone."""
    directory = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    return build("wheel", directory / f"shoal-{shoal.__version__}", directory)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the wheel is installed into, without its dependencies."""
    directory = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(directory))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    return directory


def run_python(installed: Path, directory: Path, *words: str) -> str:
    """Return what Python prints with the installed package, in `directory`, away from the
    checkout.
    """
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *words]
    ended = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def source_files() -> set[str]:
    """All source and data files of the package in this checkout, relative to the repository."""
    files = [path for path in (ROOT / "shoal").rglob("*") if path.is_file()]
    built = {"__pycache__", ".so"}
    sources = [path for path in files if built.isdisjoint({path.parent.name, path.suffix})]
    return {path.relative_to(ROOT).as_posix() for path in sources}


def test_the_package_has_files_of_every_kind() -> None:
    suffixes = {Path(name).suffix for name in source_files()}
    assert suffixes >= {".py", ".pyi", ".yaml", ".npz", ".c", ".typed"}


def test_the_source_distribution_holds_every_file_and_the_pages_about_them(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert source_files() <= names
    assert {"LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "README.md"} <= names
    assert {"Makefile", "constraints.txt", ".importlinter", ".ci/run", "docs/design.md"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")} <= names


def test_the_wheel_holds_every_file_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"shoal-{shoal.__version__}.dist-info/METADATA").decode()
    assert source_files() <= names
    assert f"shoal-{shoal.__version__}.dist-info/licenses/LICENSE" in names
    assert re.search(r"^License-Expression: Apache-2.0$", metadata, re.MULTILINE)
    assert not [name for name in names if name.endswith(".so")]


def test_the_installed_program_tells_its_version_and_its_settings(
    installed: Path, tmp_path: Path
) -> None:
    found = run_python(installed, tmp_path, "-c", "import shoal; print(shoal.__file__)")
    assert Path(found.strip()).is_relative_to(installed)
    version = run_python(installed, tmp_path, "-m", "shoal", "--version")
    assert version == f"shoal {shoal.__version__}\n"
    assert "name: residual_cnn" in run_python(
        installed, tmp_path, "-m", "shoal", "config", "digits"
    )


@pytest.mark.slow
def test_two_ranks_of_the_installed_program_train_without_a_compiler(
    installed: Path, tmp_path: Path
) -> None:
    small = ("--model.name", "mlp", "--train.max_steps", "1", "--log.tensorboard", "false")
    words = ("-m", "shoal", "train", "digits", "-n", "2", "--out", "run", *small)
    printed = run_python(installed, tmp_path, *words)
    assert "global batch 64 = 2 ranks x 32" in printed
    assert "steps             1\n" in printed
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
