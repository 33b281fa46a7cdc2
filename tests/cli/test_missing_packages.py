"""What a package that is not installed is needed for is said before any work starts, with the line
that installs it. A child process runs each command, in which the package cannot be imported.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shoal.platform.optional_packages import EXTRAS, missing

ROOT = Path(__file__).parents[2]
BLOCKED = """\
import sys
sys.path.insert(0, {root!r})
sys.modules.update(dict.fromkeys({packages!r}))
from shoal import cli
try:
    cli.main({words!r})
finally:
    print("imported:", *[name for name in ("torch",) if name in sys.modules], file=sys.stderr)
"""


def without(packages: list[str], directory: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a command where these packages are not installed."""
    program = BLOCKED.format(root=str(ROOT), packages=packages, words=line.split())
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("package", "line", "said"),
    [
        ("matplotlib", "plot run", "-o curves.png: matplotlib is not installed: pip install"),
        ("torchvision", "train digits --model.name resnet18", "model.name: torchvision is not"),
        ("torchvision", "train cifar10_resnet18", "pip install 'shoal[train]'"),
        ("timm", "train digits --model.name timm:resnet18", "pip install 'shoal[timm]'"),
        ("PIL", "train digits --data.name imagefolder", "pillow is not installed: pip install"),
        ("torchao", "train digits --optimizer.name AdamW8bit", "pip install 'shoal[lean]'"),
    ],
)
def test_a_missing_package_is_named_before_work_starts(
    tmp_path: Path, package: str, line: str, said: str
) -> None:
    (tmp_path / "t.py").write_text("print('must not run')")
    ended = without([package], tmp_path, line)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "must not run" not in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["t.py"]


@pytest.mark.slow
def test_an_experiment_without_extras_trains_with_a_note_of_what_is_left_out(
    tmp_path: Path,
) -> None:
    line = "train digits --train.max_steps 1 --model.name mlp --out run"
    ended = without(list(EXTRAS), tmp_path, line)
    assert ended.returncode == 0, ended.stderr
    assert "no TensorBoard events are written: tensorboard is not installed" in ended.stderr
    assert "note: no curves were drawn: matplotlib is not installed: pip install" in ended.stderr
    assert "curves.png" not in ended.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_every_extra_that_is_named_exists_and_brings_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, package in EXTRAS.values():
        assert any(requirement.startswith(package) for requirement in extras[extra])
        assert extra in extras["all"][0]
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert names == {"torch", "numpy", "pyyaml", "rich", "safetensors", "xxhash"}
    assert not [each for each in project["dependencies"] if "<" in each]


def test_packages_that_are_there_are_no_sentence() -> None:
    assert missing("torchvision", "PIL") == []
