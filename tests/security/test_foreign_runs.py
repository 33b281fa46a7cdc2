"""Directories and files of another user: nothing in them runs, and nothing is written through
them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from strangers import STRANGER, needs_root, strangers_files

from shoal import cli
from shoal.config import read
from shoal.errors import ConfigError
from shoal.loggers.metrics_file import MetricsFile
from shoal.train.run_directory import check_usable, lock


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command, which must be refused in one message. Return it."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("shoal: ")
    assert "Traceback" not in err
    return err


def run_of_stranger(public: Path) -> tuple[Path, Path]:
    """Return a run directory of the stranger whose configuration imports a program, and the file
    that this program makes.
    """
    ran = public / "ran"
    bomb = f"open({str(ran)!r}, 'w').close()\nmodels = {{}}\n"
    directory = strangers_files(public / "run", {"bomb.py": bomb})
    config = f"plugins: [{directory / 'bomb.py'}]\nout: {directory}\ntrain: {{max_steps: 1}}\n"
    strangers_files(directory, {"config.yaml": config})
    return directory, ran


@needs_root
def test_no_verb_runs_what_the_configuration_of_another_users_run_imports(
    capsys: pytest.CaptureFixture[str], public: Path
) -> None:
    directory, ran = run_of_stranger(public)
    model = public / "model.safetensors"
    for words in (
        ("eval", directory),
        ("replay", directory),
        ("export", directory, "-o", model),
        ("scale", directory, 2),
        ("train", directory / "config.yaml"),
        ("train", directory / "config.yaml", "--out", public / "mine"),
        ("plan-tensor", directory / "config.yaml"),
        ("train", "digits", "--out", directory),
    ):
        assert f"belongs to user {STRANGER}" in refused(capsys, *words)
    assert not ran.exists()
    assert not (public / "mine").exists()
    assert not model.exists()


@needs_root
def test_a_configuration_of_another_user_may_hold_settings_but_no_code(public: Path) -> None:
    directory = strangers_files(
        public / "shared", {"lr.yaml": "optimizer: {lr: 0.5}\n", "class.yaml": "strategy: x:Y\n"}
    )
    assert read(directory / "lr.yaml").job.optimizer.lr == 0.5
    (public / "mine.yaml").write_text(f"base: {directory / 'class.yaml'}\n")
    with pytest.raises(ConfigError, match=r"class.yaml:1: it names code to run, and .*belongs to"):
        read(public / "mine.yaml")


def test_a_run_that_others_could_have_written_is_refused_with_the_cure(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    config = directory / "config.yaml"
    config.write_text(f"out: {directory}\n")
    job = read(config).job
    check_usable(job)
    for path in (directory, config):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(ConfigError, match=r"can be written by other users.*chmod -R go-w"):
            check_usable(job)
        path.chmod(mode)


def test_a_generous_umask_makes_no_run_that_is_refused_later(tmp_path: Path) -> None:
    job = read(None, [("out", str(tmp_path / "run"))]).job
    before = os.umask(0)
    try:
        lock(job).close()
    finally:
        os.umask(before)
    check_usable(job)


def test_neither_the_lock_nor_the_metrics_are_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all that I know\n")
    directory = tmp_path / "run"
    directory.mkdir()
    job = read(None, [("out", str(directory))]).job
    (directory / ".lock").symlink_to(precious)
    for claim in (check_usable, lock):
        with pytest.raises(ConfigError, match=r"\.lock is a symbolic link"):
            claim(job)
    (directory / "metrics.jsonl").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        MetricsFile(directory, 0)
    assert precious.read_text() == "all that I know\n"


@needs_root
def test_neither_is_written_into_a_file_or_a_pipe_of_another_user(tmp_path: Path) -> None:
    with_pipe, with_file = tmp_path / "pipe", tmp_path / "file"
    with_pipe.mkdir()
    with_file.mkdir()
    os.mkfifo(with_pipe / "metrics.jsonl")
    (with_file / "metrics.jsonl").touch()
    os.chown(with_file / "metrics.jsonl", STRANGER, STRANGER)
    reasons = {with_pipe: "is no regular file", with_file: f"belongs to user {STRANGER}"}
    for directory, reason in reasons.items():
        with pytest.raises(OSError, match=reason):
            MetricsFile(directory, 0)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/../../x", "..", "x\x1b[2J", "n" * 300])
def test_no_name_leads_out_of_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name must be a name of a directory in runs/"):
        read(None, [("name", name)])
    assert read(None, [("name", "sweep/lr 0.1")]).job.directory == "runs/sweep/lr 0.1"


def test_the_umask_says_who_can_read_a_run(public: Path) -> None:
    before = os.umask(0o022)
    try:
        for umask, name in ((0o022, "open"), (0o077, "closed")):
            os.umask(umask)
            lock(read(None, [("out", str(public / name))]).job).close()
            assert (public / name).stat().st_mode & 0o777 == 0o755 & ~umask
            assert (public / name / "config.yaml").stat().st_mode & 0o777 == 0o644 & ~umask
    finally:
        os.umask(before)
