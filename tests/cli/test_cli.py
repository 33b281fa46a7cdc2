"""Commands as users type them. Wrong words are refused before any work starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal import cli


def shoal(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a command, and return its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


TINY = (
    *(
        "--model.name",
        "mlp",
        "--model.options.hidden",
        "[8]",
        "--train.max_steps",
        3,
        "--log.tensorboard",
        "false",
    ),
    *("--train.batch_size", 100),
)


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


def test_a_misspelt_verb_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal(capsys, "trian", "digits") == (
        2,
        "",
        "shoal: there is no verb 'trian'; did you mean 'train'?\n",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--strategy", "zero3,hybrid=3", "-n", 4),
            "4 ranks do not make whole groups. Use a divisor of 4.",
        ),
        (
            ("--strategy", "single", "-n", 2),
            "strategy single trains on one rank; there are 2. Use ddp",
        ),
        (
            ("--strategy", "ddp,compress=zip", "-n", 2),
            "strategy 'ddp,compress=zip': compression 'zip' is not known",
        ),
        (
            ("--optimizer.in_backward", "true", "-n", 2),
            "optimizer.in_backward: ddp on several ranks keeps all",
        ),
        (
            ("--optimizer.name", "Adafactor", "--strategy", "zero3", "-n", 2),
            "Adafactor needs whole parameters",
        ),
    ],
)
def test_what_so_many_ranks_cannot_do_is_said_without_torch_or_a_directory(
    tmp_path: Path, words: tuple[object, ...], message: str
) -> None:
    program = (
        "import sys\nfrom shoal import cli\n"
        "try: cli.main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules\n"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "train",
        "digits",
        *map(str, words),
        "--out",
        str(tmp_path / "run"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "run").exists()


def test_all_bad_settings_are_named_at_once_with_file_line_and_guess(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: digits\noptimizer:\n  lerning_rate: 0.1\ntrain:\n  epochs: many\n")
    status, _, err = shoal(capsys, "train", file, "--train.batch_size", "-3", "--sed", 1)
    assert status == 2
    assert f"{file}:3: optimizer.lerning_rate" in err
    assert f"{file}:5: train.epochs" in err
    assert "train.batch_size" in err
    assert "did you mean 'seed'" in err


def test_a_flag_without_a_value_and_a_missing_name_are_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "flag --seed: a value is missing" in shoal(capsys, "train", "digits", "--seed")[2]
    status, _, err = shoal(capsys, "train")
    assert status == 2
    assert "one NAME_OR_YAML is needed; there is none. Built in: cifar10_resnet18" in err
    assert "did you mean 'digits'" in shoal(capsys, "train", "digit")[2]


@pytest.mark.parametrize("word", ["train.epochs=3", "seed=1", "strategy=server=2"])
def test_a_setting_without_dashes_is_told_how_it_is_written(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    for words in (["digits", word, "-n", 2], ["digits", "-n", 2, "--strategy", "ddp", word]):
        status, _, err = shoal(capsys, "train", *words)
        assert status == 2
        assert f"'{word}': a setting begins with two dashes: --{word}" in err


@pytest.mark.parametrize("processes", [0, -1])
def test_no_processes_are_too_few(
    capsys: pytest.CaptureFixture[str], processes: int, tmp_path: Path
) -> None:
    assert shoal(capsys, "train", "digits", "-n", processes, "--out", tmp_path / "run")[::2] == (
        2,
        f"shoal: -n {processes}: at least one process is needed\n",
    )
    assert not (tmp_path / "run").exists()


def test_a_world_of_another_size_than_asked_for_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    status, _, err = shoal(capsys, "train", "digits", "-n", 4, "--out", tmp_path / "run")
    assert status == 2
    assert "4 processes were asked for, but this is a world of 2" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-n", 2, "--restarts", -1), "--restarts -1: must not be negative"),
        (
            ("--restarts", 3),
            "starts no process (no launcher's variables are set). Give -n 1 as well",
        ),
    ],
)
def test_restarts_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[object, ...], said: str
) -> None:
    status, _, err = shoal(capsys, "train", "digits", "--out", tmp_path / "run", *words)
    assert status == 2
    assert said in err
    assert not (tmp_path / "run").exists()


def test_restarts_belong_to_who_starts_the_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
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


def test_explain_tells_where_values_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = shoal(capsys, "config", "digits", "--explain", "--optimizer.lr", "0.2")
    assert "flag --optimizer.lr" in out
    assert "digits.yaml:" in out
    assert "default" in out


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
    found = json.loads(said)
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


def test_a_directory_that_is_no_run_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    for words in (("eval", tmp_path), ("plot", tmp_path), ("train", "digits", "--out", tmp_path)):
        status, _, err = shoal(capsys, *words)
        assert status == 2
        assert str(tmp_path) in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


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
        capsys, "train", job, "--import", file, "--out", out, "--log.tensorboard", "false"
    )
    assert status == 0, err
    assert shoal(capsys, "eval", out)[0] == 0
    status, _, err = shoal(
        capsys, "train", job, "--import", tmp_path / "no.py", "--out", tmp_path / "other"
    )
    assert status == 2
    assert "no.py: there is no such file" in err


def test_a_start_that_fails_leaves_no_run_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    status, _, err = shoal(
        capsys, "train", "cifar10_resnet18", "--out", out, "--data.path", tmp_path / "nothing"
    )
    assert status == 1
    assert "cifar-10" in err
    assert "Traceback" not in err
    assert shoal(capsys, "train", "digits", "--out", out, *TINY)[0] == 0


def test_a_refused_run_leaves_no_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "runs" / "mine"
    for words in (
        ("--model.name", "residual_cnm"),
        ("--data.name", "digit"),
        ("--model.weights", tmp_path / "none.pt"),
    ):
        assert shoal(capsys, "train", "digits", "--out", out, *words)[0] == 2
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_said_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = shoal(
        capsys, "train", "digits", "--model.name", "strange", "--out", tmp_path / "file" / "run"
    )
    assert status == 2
    assert (
        f"{tmp_path / 'file/run'} cannot be written: {tmp_path / 'file'} is no directory. Choose "
        "another --out" in err
    )


def test_the_flag_allreduce_is_short_for_an_option_of_ddp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, printed, _ = shoal(
        capsys, "config", "digits", "--allreduce", "ring", "--strategy", "ddp,bucket_mb=1"
    )
    assert yaml.safe_load(printed)["strategy"] == "ddp,bucket_mb=1,allreduce=ring"
    status, _, err = shoal(capsys, "config", "digits", "--strategy", "zero3", "--allreduce", "ring")
    assert (status, "only ddp has algorithms to choose from; the strategy is 'zero3'" in err) == (
        2,
        True,
    )
    status, _, err = shoal(capsys, "config", "digits", "--allreduce", "rnig")
    assert (status, "invalid choice: 'rnig'" in err) == (2, True)
    status, _, err = shoal(capsys, "launch", "-n", 2, "--allreduce", "ring", "script.py")
    assert (status, "Say it too: --strategy ddp" in err) == (2, True)
