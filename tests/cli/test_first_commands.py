"""Command lines that a newcomer from torchrun, accelerate, deepspeed or horovodrun types first:
each works, or ends with one sentence that has the right line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import TINY, shoal

TINY_TEXT = " ".join(map(str, TINY))

WORKS = [
    ("launch -n 2 t.py a b", "rank 0 of 2: t.py a b"),
    ("launch --nproc-per-node 2 t.py", "rank 0 of 2"),
    ("launch --nproc_per_node=2 t.py", "rank 0 of 2"),
    ("launch -np 2 t.py", "rank 0 of 2"),
    ("launch --num_processes 2 t.py", "rank 0 of 2"),
    ("launch --num_gpus 2 t.py --num_gpus 4", "rank 0 of 2: t.py --num_gpus 4"),
    ("launch -n 2 --strategy fsdp t.py", "strategy fsdp"),
    ("launch -n 2 -m package.train --lr 0.1", "rank 0 of 2: train.py --lr 0.1"),
    ("launch --module -n 2 package", "rank 0 of 2: __main__.py"),
    ("launch -n 2 t.py --strategy zero3", "rank 0 of 2: t.py --strategy zero3"),
    (f"train digits --nproc_per_node 2 --out run {TINY_TEXT}", "global batch 100 = 2 ranks x 50"),
]
"""Commands that do what is meant, and what they print."""

REFUSED = [
    ("launch t.py", "-n: how many processes? For example: shoal launch -n 4 t.py"),
    ("launch", "shoal launch: error: the following arguments are required: SCRIPT"),
    ("launch -n two t.py", "'two' is no whole number"),
    ("launch -n 2 missing.py", "there is no script missing.py in "),
    ("launch -n 2 digits", "digits is a built-in experiment: shoal train digits -n 2"),
    ("launch -n 2 my.yaml", "my.yaml is an experiment: shoal train my.yaml -n 2"),
    ("launch -n 2 package.train", "a module is -m package.train"),
    ("launch -n 2 -m package.missing", "-m package.missing: there is no such module in "),
    ("launch -n 2 -m missing.train", "-m missing.train: No module named 'missing'"),
    ("launch --nnodes 2 --nproc-per-node 2 t.py", "--nnodes: one command starts the ranks of all"),
    ("launch --node_rank 0 -n 2 t.py", "--hosts a:4,b:4 by ssh, or --slurm --nodes 2"),
    ("launch --standalone -n 2 t.py", "--standalone: ranks of one machine meet by themselves"),
    ("launch --mixed_precision bf16 -n 2 t.py", 'shoal.init(precision="bf16")'),
    ("launch --deepspeed ds.json -n 2 t.py", "--deepspeed: sharding is a strategy"),
    ("launch --max_restarts 3 -n 2 t.py", "`shoal train` restarts by itself"),
    ("launch --no_python -n 2 t.py", "modules with -m"),
    ("launch --slurm -N 2 t.py", "-N: options of sbatch are written out: --slurm with --nodes"),
    ("launch --slurm --ntasks 4 t.py", "--ntasks: with --slurm it is --nodes N --ntasks-per-node"),
    ("train digits --slurm -t 5", "-t: options of sbatch are written out"),
    ("launch -n 2 --strategy tp=4 t.py", "tensor=4 needs a multiple of 4 ranks; there are 2"),
    ("launch -n 2 --strategy zeor3 t.py", "did you mean 'zero3'?"),
    ("train", "one NAME_OR_YAML is needed; there is none. Built in: cifar10_resnet18, digits"),
    ("train mnist", "'mnist' is neither a file nor a built-in configuration"),
    ("train t.py", "t.py is a script, and this takes an experiment. A script of your own: shoal"),
    ("train digits --epochs 3", "epochs is not known; did you mean 'train.epochs'"),
    ("train digits --lr 0.1", "did you mean 'optimizer.lr'?"),
    ("train digits --seed", "flag --seed: a value is missing"),
    ("train digits epochs=3", "a setting begins with two dashes: --epochs=3"),
    ("train digits -n 2 --strategy ddp epochs=3", "a setting begins with two dashes: --epochs=3"),
    ("train digits --nnodes 2", "--nnodes: one command starts the ranks of all machines"),
    ("train digits --bf16 --seed 1", "--bf16: in a script shoal.init(precision="),
    ("train digits --strategy pp=2 -n 1", "pipeline=2"),
    ("train digits --allreduce ring", "it is an option of ddp: --strategy ddp,allreduce=ring"),
    ("train digits --servers 2", "--servers: servers are a strategy: --strategy server=2, or"),
    ("launch -n 2 --record t.py", "--record: only runs of `shoal train` can be recorded"),
    ("verify t.py --slurm --nodes 2", "--slurm: `shoal train` and `shoal launch` run on several"),
    ("run t.py", "your own script is `shoal launch -n 2 train.py`"),
    ("t.py", "there is no verb 't.py'; a script is started by `shoal launch -n 2 t.py`"),
    ("my.yaml", "an experiment is started by `shoal train my.yaml -n 2`"),
    ("fit digits", "an experiment is `shoal train digits -n 2`"),
    ("trian digits", "there is no verb 'trian'; did you mean 'train'?"),
    ("resume runs/digits", "the same command again resumes"),
    ("import a.pt digits", "`shoal train NAME_OR_YAML --weights model.safetensors`"),
    ("plan-pipeline pipeline=4,schedule=1f1b", "it is `shoal schedule pipeline=4,schedule=1f1b`"),
    ("schedule pipeline=4 -p 2", "--ranks 2: strategy pipeline=4 says 4. Leave one of them out"),
    ("schedule tensor=2", "strategy tensor=2 has no pipeline. Add it: tensor=2,pipeline=4"),
    ("env", "it is `shoal doctor`"),
    ("eval", "one run directory is needed, as in `shoal eval runs/digits`"),
    ("eval runs/digits", "runs/digits is no run directory: it has no config.yaml"),
    ("eval runs/digits --checkpoint last", "'last' is no step, and neither latest nor best"),
    ("eval runs/digits --strategy fsdp2", "runs/digits is no run directory"),
    ("export runs/digits --checkpoint -1", "'-1' is no step, and neither latest nor best"),
    ("export runs/digits --max-shard-size 5", "'5' is a number without a unit, as in 5GB"),
    ("completion", "the following arguments are required: shell"),
    ("trace runs/digits", "runs/digits"),
    ("plot", "the following arguments are required: RUN"),
    ("scale runs/digits", "the following arguments are required: N"),
    ("doctor digits", "unrecognized arguments: digits\nthe options: shoal doctor --help"),
    (
        "launch -n 2 --lr 1 t.py",
        "words of the script stand behind it: shoal launch ... SCRIPT --lr",
    ),
    ("launch -n 2 --lr 1 t.py", "the options: shoal launch --help"),
    ("train digits --import t.py", "--import: it is --plugin FILE"),
    ("train digits --imports [t.py]", "imports is not known; did you mean 'plugins'?"),
    ("launch -n 2 --output all t.py", "--output: it is --show-output here, first or all"),
    ("launch --slurm --mail-type=END t.py", "--sbatch-option=NAME=VALUE"),
    ("verify missing.py", "there is no script missing.py"),
    ("verify t.py --precision bf16", "--precision: scripts are compared in float64"),
]
"""Commands that end with status 2, and a part of the sentence."""

SCRIPT = """\
import os, sys
rank, world, name = os.environ["RANK"], os.environ["WORLD_SIZE"], os.path.basename(sys.argv[0])
print("rank", rank, "of", world + ":", name, *sys.argv[1:])
print("strategy", os.environ.get("SHOAL_STRATEGY"))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a newcomer: a script, a package and an empty experiment."""
    (tmp_path / "package").mkdir()
    for name in ("t.py", "package/train.py", "package/__main__.py"):
        (tmp_path / name).write_text(SCRIPT)
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "my.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


EVERY_DAY = (0, 8)


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        pytest.param(*row, marks=[] if number in EVERY_DAY else [pytest.mark.slow])
        for number, row in enumerate(WORKS)
    ],
)
def test_a_first_command_does_what_is_meant(here: Path, line: str, printed: str) -> None:
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-m", "shoal", *line.split()],
        cwd=here,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert printed in ended.stdout
    stands_behind = "--strategy stands behind t.py" in ended.stderr
    assert stands_behind == line.endswith("t.py --strategy zero3")


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_a_first_command_that_cannot_work_is_answered_by_one_sentence(
    capsys: pytest.CaptureFixture[str], here: Path, line: str, said: str
) -> None:
    code, out, err = shoal(capsys, *line.split())
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 3
    assert sorted(path.name for path in here.iterdir()) == ["my.yaml", "package", "t.py"]


def test_a_module_that_is_refused_leaves_the_path_as_it_was(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    before = list(sys.path)
    shoal(capsys, "launch", "-n", 2, "-m", "package.missing")
    sys.modules.pop("package", None)
    assert sys.path == before
