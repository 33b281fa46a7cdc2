"""`shoal launch --hosts`: real ranks of real agents, on hosts made of this machine."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
from hosts_command import hosts_command

from shoal.launch import output
from shoal.launch.output import LinePrinter
from tests.harness.waiting import until

SCRIPT = Path(__file__).with_name("ddp_script.py")
WAITS = """
import os, pathlib, time
pathlib.Path(f"ready.{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "a dir with ümlaut"
    directory.mkdir()
    shutil.copy(SCRIPT, directory / "train.py")
    (directory / "waits.py").write_text(WAITS)
    return directory


def is_ready(folder: Path, ranks: int = 2) -> bool:
    return len(list(folder.glob("ready.*"))) == ranks


def test_a_script_runs_on_two_hosts_with_the_numbers_of_one_process(folder: Path) -> None:
    words = ["launch", "--hosts", "noisy-a:1,b:2", "--show-output", "all", "--env", "CARRIED=x y"]
    with hosts_command(folder, *words, "train.py", "--name", "$x 'y'") as command:
        code, stdout, stderr = command.end()
        assert (code, stderr.count("warning of")) == (0, 3), stderr
        lines = sorted(stdout.splitlines())
        tail = f"CARRIED=x y PWD={folder} {folder} ['--name', \"$x 'y'\"]"
        assert lines == [
            f"0 of 3 SHOAL_HOST=noisy-a LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 {tail}",
            f"[rank 1 on b] 1 of 3 SHOAL_HOST=b LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 {tail}",
            f"[rank 2 on b] 2 of 3 SHOAL_HOST=b LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 {tail}",
        ]
        assert "[rank 2 on b] warning of 2" in stderr
        assert command.others() == []


@pytest.mark.slow
def test_parameter_servers_get_their_key_by_no_path_argument_or_variable(folder: Path) -> None:
    shutil.copy(Path(__file__).with_name("served_script.py"), folder / "served.py")
    (folder / "wait").touch()
    with hosts_command(folder, "launch", "--hosts", "a,b", "served.py") as command:
        until(lambda: (folder / "secret").exists() or command.process.poll() is not None)
        secret = (folder / "secret").read_bytes()
        for pid in (command.process.pid, *command.others()):
            for name in ("cmdline", "environ"):
                words = Path(f"/proc/{pid}/{name}").read_bytes()
                assert secret not in words
                assert secret.hex().encode() not in words
        (folder / "wait").unlink()
        code, stdout, stderr = command.end()
        assert (code, stdout) == (0, "is the model of one process\n"), stderr
        assert command.others() == []
    assert len(secret) == 32


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_its_host_and_its_code(folder: Path) -> None:
    shutil.copy(Path(__file__).with_name("hang_script.py"), folder / "hangs.py")
    words = ["launch", "--hosts", "a,b", "--hang-limit", "1.5", "hangs.py"]
    with hosts_command(folder, *words) as command:
        code, _, stderr = command.end()
        assert command.others() == []
    assert code == 124, stderr
    told = "rank 1 of 2 on b did not come: it is in the "
    assert stderr.count(told) == 2, stderr  # at once, and as the cause of the end
    assert "while rank 0 on a waits for it in all_reduce(" in stderr
    assert "\n  rank 1 on b: step 6: the " in stderr
    assert "The stack of rank 1 (process " in stderr
    assert re.search(r'hangs.py", line \d+ in sleeps_in_its_step', stderr)
    assert "is lost" not in stderr


def test_all_problems_of_all_hosts_are_told_before_any_rank_starts(folder: Path) -> None:
    words = ["launch", "--hosts", "a,unknown-b,unknown-c:2", "train.py"]
    with hosts_command(folder, *words) as command:
        assert command.end() == (
            1,
            "",
            "shoal: The run cannot start on these hosts:\n"
            "  host unknown-b: ssh says: Host key verification failed. "
            "Log in once by hand: ssh unknown-b\n"
            "  host unknown-c: ssh says: Host key verification failed. "
            "Log in once by hand: ssh unknown-c\n",
        )


def test_a_name_that_is_no_host_is_bad_input(folder: Path) -> None:
    words = ["launch", "--hosts", "unknown-a,nowhere-b", "train.py"]
    with hosts_command(folder, *words) as command:
        assert command.end() == (
            2,
            "",
            "shoal: The run cannot start on these hosts:\n"
            "  host unknown-a: ssh says: Host key verification failed. "
            "Log in once by hand: ssh unknown-a\n"
            "  host nowhere-b: ssh says: ssh: Could not resolve hostname nowhere-b: Name not "
            "known. Is the name right? An alias belongs into ~/.ssh/config\n",
        )


def test_the_first_failure_is_told_with_host_rank_and_code(folder: Path) -> None:
    with hosts_command(folder, "launch", "--hosts", "a,b", "train.py", "--fail") as command:
        code, _, stderr = command.end()
    assert code == 7
    assert "[rank 1 on b] the disk is on fire\n" in stderr
    assert stderr.endswith("rank 1 of 2 on b ended with exit code 7\n")


@pytest.mark.slow
def test_agents_end_when_their_connection_is_silent(folder: Path) -> None:
    variables = {"SHOAL_HOSTS_LEASE": "3"}
    with hosts_command(folder, "launch", "--hosts", "a,b", "waits.py", **variables) as command:
        until(lambda: is_ready(folder))
        command.signal(signal.SIGSTOP)  # as a cut network: nobody answers, nothing is closed
        until(lambda: command.others() == [], 10)


def test_lines_of_other_ranks_begin_with_rank_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter()
    printer.put("a", 0, "stdout", "10%\r20%\r")
    printer.put("b", 3, "stdout", "one\ntwo\n")
    printer.put("b", 3, "stderr", "caf\udce9\n")
    printer.flush()
    assert capsys.readouterr() == (
        "10%\r20%\r[rank 3 on b] one\n[rank 3 on b] two\n",
        "[rank 3 on b] caf\\udce9\n",
    )


def test_a_terminal_that_stands_still_blocks_nobody_and_loses_lines_that_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stands_still = threading.Event()
    write = LinePrinter._write

    def wait_and_write(printer: LinePrinter, stream: str, text: str) -> None:
        stands_still.wait()
        write(printer, stream, text)

    monkeypatch.setattr(output, "MOST_WAITING", 10)
    monkeypatch.setattr(LinePrinter, "_write", wait_and_write)
    printer = LinePrinter("first")
    for number in range(100):
        printer.put("a", 0, "stdout", f"{number}\n")
        printer.put("a", 1, "stdout", "not shown\n")
    printer.dropped += 7
    stands_still.set()
    printer.flush()
    stdout, stderr = capsys.readouterr()
    printed = stdout.splitlines()
    assert 10 <= len(printed) <= 11
    assert stderr == f"note: {100 - len(printed) + 7} lines of ranks were not printed\n"
