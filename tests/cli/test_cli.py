"""Commands as users type them. Wrong words are refused before any work starts."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from cli_calls import TINY, in_a_world_of_two, shoal

from shoal.cli import main, program
from shoal.errors import PeerLost
from shoal.launch import failure


def test_help_and_config_import_no_torch() -> None:
    program = (
        "import sys\nfrom shoal import cli\n"
        "for words in (['--help'], ['train', '--help'], ['scale', '--help'],"
        " ['config', 'digits', '--explain']):\n"
        "    try: cli.main(words)\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_no_words_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = shoal(capsys)
    assert status == 0
    assert "shoal train digits -n 2" in out


def test_restarts_belong_to_who_starts_the_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_a_world_of_two(monkeypatch)
    status, _, err = shoal(capsys, "train", "digits", "--restarts", 3, "--out", tmp_path / "run")
    assert status == 2
    assert "Use what that launcher has, or leave --restarts out" in err


def test_config_prints_what_reproduces_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, first, _ = shoal(capsys, "config", "digits", "--optimizer.lr", "5e-5", "--seed=3")
    file = tmp_path / "again.yaml"
    file.write_text(first)
    assert yaml.safe_load(first)["optimizer"]["lr"] == 5e-5
    assert shoal(capsys, "config", file) == (0, first, "")


def test_a_distribuuuu_command_line_works_as_it_stands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cfg = tmp_path / "resnet18.yaml"
    cfg.write_text("MODEL:\n  ARCH: resnet18\nOPTIM:\n  BASE_LR: 0.2\n")
    words = ("--cfg", cfg, "TRAIN.BATCH_SIZE", 128, "OUT_DIR", "./out", "OPTIM.BASE_LR", 6.4)
    status, out, err = shoal(capsys, "config", "-n", 8, *words)
    found = yaml.safe_load(out)
    assert status == 0
    assert (found["optimizer"]["lr"], found["train"]["batch_size"], found["out"]) == (
        6.4,
        1024,
        "./out",
    )
    assert "global batch is 1024 = 8 x 128" in err
    assert "did you mean" in shoal(capsys, "config", "--cfg", cfg, "TRAIN.BACH_SIZE", 1)[2]


def test_train_evaluate_plot_and_train_again(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    status, said, _ = shoal(capfd, "train", "digits", "--out", out, *TINY)
    assert status == 0
    assert said.startswith("global batch 100 = 1 rank x 100\n")
    assert sorted(path.name for path in out.iterdir() if path.name[0] != ".") == [
        *("checkpoints", "config.yaml", "curves.png", "metrics.jsonl"),
    ]
    status, said, _ = shoal(capfd, "eval", out, "--json")
    found = json.loads(said)["result"]
    assert {"top1", "top5", "loss", "samples"} <= found.keys()
    recorded = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert recorded[-1]["loss"] == found["loss"]
    assert "top1" in shoal(capfd, "eval", out, "--checkpoint", "best")[1]
    assert shoal(capfd, "plot", out, out, "-o", tmp_path / "both.svg")[0] == 0
    assert (tmp_path / "both.svg").read_text().startswith("<?xml")
    before = (out / "metrics.jsonl").read_bytes()
    assert shoal(capfd, "train", "digits", "--out", out, *TINY)[0] == 0
    assert (out / "metrics.jsonl").read_bytes() == before
    status, _, err = shoal(capfd, "train", "digits", "--out", out, *TINY, "--optimizer.lr", 0.5)
    assert status == 2
    assert "holds another experiment: optimizer.lr" in err


@pytest.mark.slow
def test_models_and_data_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "from shoal.data.source import Source\n"
        "def net(num_classes, input_shape, width=3):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(input_shape[0], width),"
        " torch.nn.Linear(width, num_classes))\n"
        "def points(config, seed):\n"
        "    data = TensorDataset(torch.randn(20, 2), torch.randint(0, 2, (20,)))\n"
        "    return Source(data, data, 'classification', 2, (2,))\n"
        "models = {'net': net}\ndata = {'points': points}\n"
    )
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: {name: net, options: {width: 5}}\ndata: {name: points}\n"
        "train: {epochs: 1, batch_size: 8}\n"
    )
    out = tmp_path / "run"
    status, _, err = shoal(
        capsys, "train", job, "--plugin", file, "--out", out, "--log.tensorboard", "false"
    )
    assert status == 0, err
    assert shoal(capsys, "eval", out)[0] == 0
    status, _, err = shoal(
        capsys, "train", job, "--plugin", tmp_path / "no.py", "--out", tmp_path / "other"
    )
    assert status == 2
    assert "no.py: there is no such file" in err


def test_an_error_that_ends_a_verb_is_known_to_what_runs_at_the_end_of_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another rank would take one that has lost a third for one that has left its loop."""
    lost = PeerLost("rank 2 is lost")
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setattr(program, "_run", Mock(side_effect=lost))
    monkeypatch.setattr(failure, "explanations", [lambda error, _: PeerLost(f"so: {error}")])
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == 1
    assert sys.last_value is lost
    assert capsys.readouterr().err == "shoal: so: rank 2 is lost\n"
