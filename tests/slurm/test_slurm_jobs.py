"""`--slurm` with commands that behave as Slurm's do, from the command line to the job's end."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import fake_slurm_commands
import pytest
from cli_calls import shoal

from shoal.launch import batch_script
from shoal.launch.batch_script import ClusterWork, _sbatch_options


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the state of the only job, submitted in a directory with a blank."""
    folder = fake_slurm_commands.install(tmp_path, monkeypatch)
    (tmp_path / "my jobs").mkdir()
    monkeypatch.chdir(tmp_path / "my jobs")
    return folder


def slurm_options(**values: object) -> argparse.Namespace:
    """The options of a command for one task."""
    defaults = {"time": None, "partition": None, "sbatch_option": (), "requeues": 20}
    return argparse.Namespace(nodes=1, ntasks_per_node=1, **defaults | values)


def ended(slurm: Path) -> str:
    """The state of the job once it has ended."""
    limit = time.monotonic() + 60
    while "JobState=R" in (state := (slurm / "state").read_text()) or "PENDING" in state:
        assert time.monotonic() < limit
        time.sleep(0.02)
    return state


def test_a_script_runs_as_one_world_with_its_own_words_and_the_log_shows_rank_0(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a script.py").write_text(
        "import os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')\n"
        "print(*(os.environ[name] for name in names), int(os.environ['MASTER_PORT']) > 1000)\n"
        "print(os.environ['SHOAL_STRATEGY'], sys.argv[1:])\n"
    )
    # Of the job from which this one is submitted, and of a user who wants other things by default.
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1")
    monkeypatch.setenv("SBATCH_ACCOUNT", "default")
    words = ("--slurm", "--nodes", 2, "--strategy", "zero3", "a script.py", "--time", "it's $x")
    status, out, err = shoal(capsys, "launch", *words)
    assert status == 0, err
    assert out == (
        "shoal: job 12 is submitted; its log: tail -F a-script-12.out; its state: squeue -j 12; "
        "its end: scancel 12\n"
    )
    assert "COMPLETED" in ended(slurm)
    assert Path("a-script-12.out").read_text().splitlines() == [
        "0 2 0 1 127.0.0.1 True",
        """zero3 ['--time', "it's $x"]""",
        "shoal: the job's script ends with exit code 0",
    ]
    inherited = (slurm / "environment").read_text().splitlines()
    assert "SBATCH_SIGNAL" not in inherited
    assert "SBATCH_ACCOUNT" in inherited


def test_options_for_sbatch_count_more_than_variables_of_the_shell(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_TIMELIMIT", "SBATCH_CPUS_PER_TASK", "SBATCH_EXPORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SBATCH_PARTITION", "large")
    Path("script.py").touch()
    more = ("--time", 5, "--sbatch-option=cpus-per-task=2", "--sbatch-option=exclusive")
    assert shoal(capsys, "launch", "--slurm", *more, "script.py")[0] == 0
    assert "COMPLETED" in ended(slurm)
    script = (slurm / "script").read_text()
    assert "#SBATCH --cpus-per-task=2\n#SBATCH --exclusive\n" in script
    inherited = (slurm / "environment").read_text().splitlines()
    assert {name for name in inherited if name.startswith("SBATCH_")} == {
        "SBATCH_PARTITION",
        "SBATCH_EXPORT",
    }


def test_the_code_of_the_rank_that_fails_is_that_of_the_job(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fails.py").write_text("import os, sys\nsys.exit(7 * int(os.environ['RANK']))\n")
    status, _, err = shoal(capsys, "launch", "--slurm", "--nodes", 2, "fails.py")
    assert status == 0, err
    assert "JobState=FAILED Reason=None Restarts=0 ExitCode=7:0" in ended(slurm)
    assert "the job's script ends with exit code 7" in Path("fails-12.out").read_text()


def test_ranks_that_a_signal_has_ended_are_told_in_the_log(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ended.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    status, _, err = shoal(capsys, "launch", "--slurm", "ended.py")
    assert status == 0, err
    ended(slurm)
    log = next(Path().glob("ended-*.out")).read_text()
    assert "SIGTERM has ended the ranks, which saved nothing" in log
    assert "the job's script ends with exit code 143" in log


def test_a_run_that_was_stopped_and_has_saved_goes_on_in_the_queue(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("saves.py").write_text(
        "import os, sys\nprint('start', count := int(os.environ['SLURM_RESTART_COUNT']))\n"
        "sys.exit(75 if count < 2 else 0)\n"
    )
    log = Path("saves-12.out")
    assert shoal(capsys, "launch", "--slurm", "saves.py")[0] == 0
    assert "COMPLETED" in ended(slurm)
    starts = [line for line in log.read_text().splitlines() if "start" in line]
    assert starts == [f"start {n}" for n in "012"]
    assert shoal(capsys, "launch", "--slurm", "--requeues", 0, "saves.py")[0] == 0
    assert "ExitCode=75" in ended(slurm)
    assert "saved, and not requeued; submit the job again to go on" in log.read_text()


def test_a_cancelled_run_that_saves_is_not_requeued(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("waits.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "os.system('scancel 12')\n"
        "time.sleep(60)\n"
    )
    assert shoal(capsys, "launch", "--slurm", "waits.py")[0] == 0
    limit = time.monotonic() + 60
    while "CANCELLED" not in (slurm / "state").read_text():
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert not (slurm / "requeue").exists()


def test_a_rank_that_was_killed_starts_all_again_in_the_same_job(slurm: Path) -> None:
    Path("dies.py").write_text(
        "import os, pathlib, signal\n"
        "if not pathlib.Path('died').exists():\n"
        "    pathlib.Path('died').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    work = ClusterWork("job", ("dies.py",), {}, None, 3)
    script = batch_script.render(
        slurm_options(),
        *(work, sys.executable, os.getcwd(), "shoal"),
    )
    (slurm / "state").write_text("JobState=RUNNING Reason=None")
    environment = {**os.environ, "SLURM_JOB_ID": "12"}
    run = subprocess.run(
        ["bash"], input=script, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "a rank was killed (exit code 137); restart 1 of 3" in run.stderr


def test_what_slurm_refuses_is_said_in_one_line(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script.py").touch()
    status, _, err = shoal(
        capsys, "launch", "--slurm", "--sbatch-option", "account=nobody", "script.py"
    )
    assert status == 2
    assert err == (
        "shoal: sbatch refused the job: sbatch: error: Batch job submission failed: "
        "Invalid account specified\n"
    )


@pytest.mark.parametrize(
    ("words", "variable", "problem"),
    [
        (("--nodes", 5), "", "--nodes 5: partition debug has 4"),
        (("--nodes", 65, "--partition", "debug,large"), "", "debug has 4, partition large has 64"),
        (("--nodes", 65), "large", "--nodes 65: partition large has 64"),
        (("--partition", "lage"), "", "--partition lage: Slurm has debug, large"),
    ],
)
def test_nodes_and_partitions_that_are_not_there_are_refused_before_the_submission(
    slurm: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    variable: str,
    problem: str,
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", variable)
    Path("script.py").touch()
    status, _, err = shoal(capsys, "launch", "--slurm", *words, "script.py")
    assert status == 2
    assert problem in err
    assert not (slurm / "script").exists()


def test_a_time_in_which_ranks_can_hardly_save_is_told(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script.py").touch()
    words = ("--slurm", "--nodes", 4, "--time", 1, "script.py")
    status, out, _ = shoal(capsys, "launch", *words)
    assert status == 0
    assert "--time 1 is short: the ranks are told to save 15 s before its end" in out


def test_a_dry_run_prints_the_script_of_train_and_submits_nothing(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--slurm", "--nodes", 2, "--ntasks-per-node", 2, "--time", "04:00:00", "--dry-run")
    more = ("--sbatch-option=constraint=a100", "--train.epochs", 3, "--out", "my runs/x")
    status, out, _ = shoal(capsys, "train", "digits", *words, *more)
    assert status == 0
    assert not (slurm / "script").exists()
    assert "#SBATCH --time=04:00:00\n#SBATCH --signal=TERM@120\n#SBATCH --requeue\n" in out
    assert "#SBATCH --constraint=a100\n" in out
    assert "srun --ntasks=4 --kill-on-bad-exit=0 \\\n" in out
    assert "-m shoal train digits --train.epochs 3 --out 'my runs/x'\n" in out
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0


def test_no_variable_of_the_shell_is_in_the_script(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "5dd0c7b8a1")
    _, out, _ = shoal(capsys, "train", "digits", "--slurm", "--nodes", 2, "--dry-run")
    assert "#SBATCH --nodes=2\n" in out
    assert "5dd0c7b8a1" not in out
    assert "MY_TOKEN" not in out


def test_all_that_is_wrong_is_said_at_once_and_nothing_is_submitted(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(slurm))
    words = ("--slurm", "--time", "soon")
    more = ("--partition", "a b", "--sbatch-option=nodes=3", "--sbatch-option=array=1-3")
    more += ("--sbatch-option=mem=1G", "--sbatch-option=mem=2G", "--hang-limit", 30)
    wrong = ("-n", 3, "missing.py")
    status, _, err = shoal(capsys, "launch", *words, *more, *wrong)
    assert status == 2
    for part in (
        "-n, --hang-limit: not with --slurm",
        "there is no script missing.py",
        "--time soon: no time limit",
        "--sbatch-option 'nodes=3': the batch script relies on its own nodes",
        "--sbatch-option 'array=1-3': the batch script relies on its own array",
        "there is no sbatch on the PATH",
    ):
        assert part in err, err
    words = ("digits", "--slurm", "--min-hosts", 2, "--env", "A=1", "--nodes", 2)
    status, _, err = shoal(capsys, "train", *words, "--strategy", "tensor=2")
    assert status == 2
    assert "--env, --min-hosts: not with --slurm" in err
    assert "tensor=2: tensor groups lie inside one machine, and one has LOCAL_WORLD_SIZE=1" in err
    status, _, err = shoal(capsys, "train", "digits", "--slurm", "--strategy", "auto")
    assert status == 2
    assert "--strategy auto: every rank of the job would choose by itself" in err
    status, _, err = shoal(capsys, "train", "digits", "--slurm", "--strategy", "single,x=1")
    assert status == 2
    assert "there is no sbatch" in err
    assert "strategy" in err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--nodes", "x", "'x' is no whole number"),
        ("--ntasks-per-node", 0, "0 must be from 1"),
        ("--requeues", -1, "-1 must be from 0"),
    ],
)
def test_a_number_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: object, message: str
) -> None:
    status, _, err = shoal(capsys, "train", "digits", "--slurm", option, value)
    assert status == 2
    assert f"argument {option}: {message}" in err


def test_servers_on_several_machines_need_a_directory_for_their_key(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "digits", "--slurm", "--nodes", 2, "--dry-run", "--strategy", "server=1")
    status, _, err = shoal(capsys, *words)
    assert status == 2
    assert "Set SHOAL_SERVER_DIRECTORY to a directory that all of them share" in err
    monkeypatch.setenv("SHOAL_SERVER_DIRECTORY", "/shared/my keys")
    assert "export SHOAL_SERVER_DIRECTORY='/shared/my keys'\n" in shoal(capsys, *words)[1]


def test_options_of_a_cluster_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = shoal(capsys, "train", "digits", "--nodes", 2, "--dry-run")
    assert status == 2
    assert err == "shoal: --nodes, --dry-run: only with --slurm\n"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(None, 120), ("0", 120), ("1", 15), ("2", 30), ("1:30", 22), ("4:00:00", 120), ("1-0", 120)],
)
def test_ranks_are_told_of_the_time_limit_in_time(time: str | None, seconds: int) -> None:
    assert batch_script.notice_s(time) == seconds
    assert list(batch_script.problems(slurm_options(time=time))) == []


def test_a_value_for_sbatch_stays_one_value() -> None:
    more = ("comment=a b --partition=c", "constraint=a100", "exclusive")
    given = [*_sbatch_options(slurm_options(sbatch_option=more), "job")]
    assert given[-3:] == ["--comment='a b --partition=c'", "--constraint=a100", "--exclusive"]
