import subprocess
import sys
from pathlib import Path

import pytest

from shoal.config import Job, builtin_names, read
from shoal.errors import ConfigError


def problems(source: str | Path | None, *flags: tuple[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(source, flags)
    return list(error.value.problems)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty directory the current one, so that messages have short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_given_is_all_defaults() -> None:
    settings = read(None)
    assert settings.job == Job()
    assert set(settings.origins.values()) == {"default"}


def test_every_value_knows_where_it_came_from(here: Path) -> None:
    (here / "mine.yaml").write_text(
        "optimizer:\n  lr: 5e-5\n  nesterov: true\nmodel:\n  options:\n    width: 64\n"
    )
    settings = read("mine.yaml", [("optimizer.lr", "1e-3"), ("seed", "7")])
    assert settings.job.optimizer.lr == 1e-3
    assert settings.job.optimizer.nesterov is True
    assert settings.origins["optimizer.lr"] == "flag --optimizer.lr"
    assert settings.origins["optimizer.nesterov"] == "mine.yaml:3"
    assert settings.origins["model.options.width"] == "mine.yaml:6"
    assert settings.origins["seed"] == "flag --seed"
    assert settings.origins["data.workers"] == "default"


def test_a_run_is_called_after_its_file_unless_the_file_says_otherwise(here: Path) -> None:
    (here / "mine.yaml").write_text("base: digits\n")
    (here / "named.yaml").write_text("name: other\n")
    assert (read("mine.yaml").job.name, read("named.yaml").job.name, read("digits").job.name) == (
        "mine",
        "other",
        "digits",
    )
    assert read("mine.yaml").job.directory == "runs/mine"


def test_text_stays_as_it_was_written(here: Path) -> None:
    (here / "007.yaml").write_text("out: 1e3\nplugins: [1.0]\n")
    job = read("007.yaml", [("data.path", "010")]).job
    assert (job.name, job.out, job.plugins, job.data.path) == ("007", "1e3", ("1.0",), "010")


def test_a_file_may_start_from_a_built_in_one_or_from_a_neighbour(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "below.yaml").write_text("base: digits\noptimizer:\n  lr: 0.3\n")
    (here / "top.yaml").write_text("base: sub/below.yaml\ntrain.epochs: 2\n")
    settings = read("top.yaml")
    assert (settings.job.data.name, settings.job.optimizer.lr, settings.job.train.epochs) == (
        "digits",
        0.3,
        2,
    )
    assert settings.origins["optimizer.lr"] == "sub/below.yaml:3"
    assert settings.origins["train.epochs"] == "top.yaml:2"
    assert settings.origins["train.batch_size"].startswith("builtin/digits.yaml:")


def test_bases_that_go_round_in_a_circle_are_refused(here: Path) -> None:
    (here / "a.yaml").write_text("base: b.yaml\n")
    (here / "b.yaml").write_text("seed: 1\nbase: a.yaml\n")
    (line,) = problems("a.yaml")
    assert (
        line
        == "b.yaml:2: base: a.yaml -> b.yaml -> a.yaml goes round in a circle; let one of them "
        "stand alone"
    )


def test_options_add_up_key_by_key_and_leave_with_their_name(here: Path) -> None:
    (here / "gpt.yaml").write_text("model: {name: gpt, options: {layers: 2, width: 64}}\n")
    (here / "wide.yaml").write_text("base: gpt.yaml\nmodel: {options: {width: 512}}\n")
    assert read("wide.yaml").job.model.options == {"layers": 2, "width": 512}
    assert read("wide.yaml", [("model.options.layers", "8")]).job.model.options == {
        "layers": 8,
        "width": 512,
    }
    assert read("wide.yaml", [("model.options", "{heads: 2}")]).job.model.options["heads"] == 2
    assert read("wide.yaml", [("model.options", "none")]).job.model.options == {}
    assert read("wide.yaml", [("model.name", "gpt")]).job.model.options == {
        "layers": 2,
        "width": 512,
    }
    lstm = read("wide.yaml", [("model.name", "lstm"), ("model.options.width", "8")])
    assert lstm.job.model.options == {"width": 8}
    assert "model.options.layers" not in lstm.origins


def test_flags_take_lists_and_clear_with_none() -> None:
    flags = [
        ("train.clip_norm", "1"),
        ("train.clip_norm", "none"),
        ("schedule.milestones", "[3, 6]"),
    ]
    job = read(None, [*flags, ("data.shape", "5"), ("plugin", "a.py"), ("plugin", "b.py")]).job
    assert job.train.clip_norm is None
    assert job.schedule.milestones == (3, 6)
    assert job.data.shape == (5,)
    assert job.plugins == ("a.py", "b.py")


def test_whole_numbers_may_be_written_as_floats_and_bools_are_no_numbers() -> None:
    assert read(None, [("train.max_steps", "1e3")]).job.train.max_steps == 1000
    assert isinstance(read(None, [("optimizer.lr", "1")]).job.optimizer.lr, float)
    assert problems(
        None, ("train.epochs", "1.5"), ("train.batch_size", "true"), ("optimizer.lr", "true")
    ) == [
        "flag --train.epochs: train.epochs must be a whole number, not 1.5",
        "flag --train.batch_size: train.batch_size must be a whole number, not true",
        "flag --optimizer.lr: optimizer.lr must be a number, not true",
    ]


def test_all_problems_are_reported_at_once_with_file_and_line(here: Path) -> None:
    (here / "bad.yaml").write_text(
        "optimzer:\n  lr: 1\n"
        "optimizer:\n  lerning_rate: 0.1\n  lr: -1\n  momentum: no\n"
        "train:\n  precision: fp17\n  accumulate: 64\n  batch_size: 32\n"
    )
    assert problems("bad.yaml", ("lr", "3"), ("schedule", "cosine"), ("out", "[")) == [
        "bad.yaml:1: optimzer is not known; did you mean 'optimizer'?",
        "bad.yaml:4: optimizer.lerning_rate is not known; did you mean 'optimizer.lr'?",
        "flag --lr: lr is not known; did you mean 'optimizer.lr'?",
        "flag --schedule: schedule is a section and takes no value; it holds name, options, "
        "interval, warmup_epochs, warmup_steps, warmup_factor, "
        "final_factor, milestones, gamma",
        "flag --out: not YAML: expected the node content, but found '<stream end>'",
        "bad.yaml:5: optimizer.lr must be greater than 0, not -1.0",
        "bad.yaml:6: optimizer.momentum must be a number, not 'no'",
        "bad.yaml:8: train.precision must be one of fp64, fp32, bf16, fp16, not fp17; did you mean "
        "'fp16'?",
        "bad.yaml:9: train.accumulate is 64, more parts than the 32 samples of train.batch_size",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rate", "did you mean 'optimizer.lr'?"),
        ("batchsize", "did you mean 'train.batch_size' or 'evaluation.batch_size'?"),
        ("train.batchsize", "did you mean 'train.batch_size'?"),
        ("train.epoch", "did you mean 'train.epochs'?"),
        ("optimizer.epochs", "did you mean 'train.epochs'?"),
        ("strategy.name", "did you mean 'strategy'?"),
        ("checkpoint.every", "did you mean 'checkpoint.every_epochs' or 'checkpoint.every_steps'?"),
        ("trian.epochs", "did you mean 'train.epochs'?"),
        ("log.xyz", "known in log: log.every, log.tensorboard, log.loggers, log.trace"),
        ("model.option.width", "did you mean 'model.options.width'?"),
    ],
)
def test_an_unknown_name_comes_with_what_was_meant(name: str, hint: str) -> None:
    assert problems(None, (name, "1")) == [f"flag --{name}: {name} is not known; {hint}"]


def test_a_name_like_nothing_at_all_lists_what_there_is() -> None:
    (line,) = problems(None, ("xyzzy", "1"))
    assert line.startswith(
        "flag --xyzzy: xyzzy is not known; known: name, seed, strategy, out, plugins, model, data,"
    )


def test_a_setting_given_twice_in_two_spellings_is_refused(here: Path) -> None:
    (here / "twice.yaml").write_text("optimizer.lr: 0.1\noptimizer:\n  lr: 0.2\n")
    assert problems("twice.yaml") == [
        "twice.yaml:3: optimizer.lr is set twice, at twice.yaml:1 too; remove one"
    ]


def test_an_option_must_be_a_keyword_argument() -> None:
    (line,) = problems(None, ("model.options.block.width", "3"))
    assert line.endswith(
        "'block.width' cannot be a keyword argument in model.options; write what lies deeper as "
        "KEY: {...}"
    )
    assert read(None, [("model.options.block", "{width: 3}")]).job.model.options == {
        "block": {"width": 3}
    }


def test_a_section_of_comments_only_sets_nothing(here: Path) -> None:
    (here / "empty.yaml").write_text("optimizer:\n  # lr: 3\ntrain:\n")
    assert read("empty.yaml").job == Job(name="empty")


def test_a_source_that_does_not_exist_comes_with_a_near_name(here: Path) -> None:
    assert problems("digts") == [
        "digts: 'digts' is neither a file nor a built-in configuration; did you mean 'digits'?"
    ]
    (line,) = problems(Path("digits"))
    assert line.startswith("digits: 'digits' is neither a file nor")
    (here / "x.yaml").write_text("seed: 1\nbase: imagenet\n")
    assert problems("x.yaml")[0].startswith(
        "x.yaml:2: base: 'imagenet' is neither a file nor a built-in"
    )


def test_files_that_cannot_be_read_say_why(here: Path) -> None:
    (here / "runs").mkdir()
    (here / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    assert problems("runs") == ["runs: is a directory; a run's configuration is runs/config.yaml"]
    assert "cannot be read: 'utf-8' codec" in problems("binary.yaml")[0]


def test_a_built_in_name_comes_before_a_file_of_that_name(here: Path) -> None:
    (here / "digits").write_text("seed: 9\n")
    assert read("digits").job.seed == 0
    assert read("./digits").job.seed == 9


def test_the_built_in_configurations_are_those_that_were_promised() -> None:
    assert list(builtin_names()) == [
        "cifar10_resnet18",
        "digits",
        "imagenet_resnet18",
        "imagenet_resnet50",
        "stdlib_gpt",
        "stdlib_lstm",
    ]


def test_reading_a_configuration_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, shoal.config as c; c.read('digits'); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
