"""Real ranks on this machine. Tests that signal the launcher start it as a program of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import launch_targets
import never_ending_program
import pytest

from shoal.errors import LaunchError
from shoal.launch import restarting
from shoal.platform.cgroups import usable_cores
from tests.harness import local
from tests.harness.process_tree import marked
from tests.harness.waiting import until


def notes(folder: Path, name: str) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob(f"{name}.*"))]


def ready(folder: Path) -> list[list[str]]:
    """Return pid and `isatty` of each rank of `never_ending_program` with a data-loader worker."""
    return [path.read_text().split() for path in sorted(folder.glob("*.ready"))]


def alive(pids: list[str]) -> list[str]:
    return [pid for pid in pids if Path("/proc", pid).exists()]


def test_every_rank_reads_its_rank_and_the_port_is_free_afterwards(tmp_path):
    assert local.run(launch_targets.writes_its_rank, (str(tmp_path),), 3) == 0
    assert notes(tmp_path, "place") == [f"shoal {rank}/3 {rank}/3" for rank in range(3)]
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(notes(tmp_path, "port")[0]))) != 0


def test_ranks_divide_the_cores_and_the_server_has_one_thread(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    local.run(launch_targets.writes_its_threads, (str(tmp_path),), 1)
    assert notes(tmp_path, "threads") == [f"{usable_cores()} 1"]
    local.run(launch_targets.writes_its_threads, (str(tmp_path),), 2, {"OMP_NUM_THREADS": "3"})
    assert notes(tmp_path, "threads") == ["3 1", "3 1"]


def test_every_process_of_a_run_has_a_name_for_ps(tmp_path):
    local.run(launch_targets.writes_its_name, (str(tmp_path),), 2)
    assert notes(tmp_path, "name") == ["shoal rank 0", "shoal rank 1"]


def test_the_root_cause_is_printed_last_and_in_full(tmp_path, capfd):
    assert local.run(launch_targets.fails_in_rank_one, (str(tmp_path),), 3) == 1
    printed = capfd.readouterr().err
    assert (
        "rank 1 of 3 failed: ValueError: first line\n\nTraceback (most recent call last):\n"
        in printed
    )
    assert printed.endswith("ValueError: first line\nsecond line\n")
    assert printed.count("Traceback") == 1
    assert "shoal/launch" not in printed
    assert alive(notes(tmp_path, "pid")) == []


def test_a_failure_ends_ranks_that_do_something_else(tmp_path, capfd):
    assert local.run(launch_targets.fails_in_rank_one_while_others_sleep, (str(tmp_path),), 3) == 1
    assert capfd.readouterr().err.endswith("ValueError: nothing to lose\n")
    assert alive(notes(tmp_path, "pid")) == []


def test_a_rank_that_was_killed_is_named_and_not_the_ranks_that_lost_it(tmp_path, capfd):
    assert local.run(launch_targets.dies_in_rank_one, (str(tmp_path),), 2) == 128 + signal.SIGKILL
    printed = capfd.readouterr().err
    assert printed.endswith("rank 1 of 2 was killed by SIGKILL (out of memory?)\n")
    assert "Traceback" not in printed


def test_an_error_with_a_cure_has_no_traceback(tmp_path, capfd):
    assert local.run(launch_targets.lacks_data, (str(tmp_path),), 2) == 1
    assert capfd.readouterr().err == "rank 1 of 2: data/x is not there; put it there\n"


def test_a_model_that_a_strategy_refuses_is_bad_input(tmp_path, capfd):
    assert local.run(launch_targets.refuses_the_model, (str(tmp_path),), 2) == 2
    told = "rank 1 of 2: tensor: nothing of the model can be divided. Use ddp.\n"
    assert capfd.readouterr().err == told


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 3], 3), ([75, 75], 75), ([75, 0], 75), ([75, 4], 4), ([-1, 0], 255)],
)
def test_the_exit_code_is_that_of_the_ranks(tmp_path, capfd, codes, code):
    assert local.run(launch_targets.exits, (str(tmp_path), codes), 2) == code


def test_a_sigterm_is_passed_on_so_that_ranks_save_and_ask_to_be_run_again(tmp_path):
    assert local.run(launch_targets.saves_when_told, (str(tmp_path), os.getpid()), 2) == 75
    assert len(notes(tmp_path, "saved")) == 2


def test_a_sigterm_ends_ranks_without_a_handler(tmp_path, capfd):
    arguments = (str(tmp_path), os.getpid(), signal.SIGTERM)
    assert local.run(launch_targets.signals_its_parent, arguments, 2) == 128 + signal.SIGTERM
    assert "Traceback" not in capfd.readouterr().err


def test_a_sigterm_while_ranks_are_started_ends_them(tmp_path, monkeypatch):
    start = restarting.start

    def signalled(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*args, **options)

    monkeypatch.setattr(restarting, "start", signalled)
    arguments = (str(tmp_path), os.getpid(), 0)
    assert local.run(launch_targets.signals_its_parent, arguments, 2) == 128 + signal.SIGTERM


def test_ranks_that_exceed_the_grace_time_are_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(restarting, "Supervision", partial(restarting.Supervision, grace_s=0.1))
    arguments = (str(tmp_path), os.getpid())
    assert local.run(launch_targets.ignores_the_end, arguments, 2) == 128 + signal.SIGTERM
    assert alive(notes(tmp_path, "pid")) == []


def test_an_interrupt_ends_all_in_order_and_without_a_traceback(tmp_path, capfd):
    arguments = (str(tmp_path), os.getpid(), signal.SIGINT)
    assert local.run(launch_targets.signals_its_parent, arguments, 2) == 130
    assert len(notes(tmp_path, "finally")) == len(notes(tmp_path, "exit")) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_signals_reach_this_process_as_before_when_the_ranks_have_ended(tmp_path):
    before = [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)
    ]
    local.run(launch_targets.exits, (str(tmp_path), [0]), 1)
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)
    ] == before


def test_stdout_is_that_of_rank_0_and_stderr_lines_have_their_rank(tmp_path, capfd):
    local.run(launch_targets.prints, (str(tmp_path),), 2)
    printed = capfd.readouterr()
    assert printed.out == "stdout of 0\n"
    assert sorted(printed.err.splitlines()) == ["[rank 1] stderr of 1", "stderr of 0"]


def test_output_all_shows_stdout_of_every_rank(tmp_path, capfd):
    local.run(launch_targets.prints, (str(tmp_path),), 2, output="all")
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 1] stdout of 1", "stdout of 0"]


@pytest.mark.slow
def test_a_line_of_rank_0_is_one_write_where_python_buffers_nothing(tmp_path):
    (tmp_path / "says.py").write_text("print('one'); print('two')")
    reader, writer = os.pipe2(os.O_DIRECT)  # a read returns what one write has written
    with open(reader, "rb", buffering=0) as packets:
        with open(writer, "wb") as stdout:
            command = [sys.executable, "-m", "shoal", "launch", "-n", "1", "says.py"]
            environment = os.environ | {"PYTHONUNBUFFERED": "1"}
            subprocess.run(command, cwd=tmp_path, env=environment, stdout=stdout, check=True)
        assert list(iter(lambda: packets.read(1 << 12), b"")) == [b"one\n", b"two\n"]


@pytest.mark.parametrize("processes", [0, -2])
def test_less_than_one_process_is_refused(tmp_path, processes):
    with pytest.raises(LaunchError, match=f"{processes} processes were asked for"):
        local.run(launch_targets.prints, (str(tmp_path),), processes)


def wordless(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a program ends without a word but torch's warnings of the network."""
    output, _ = process.communicate()
    return all(line.startswith(b"[W") and b"[c10d]" in line for line in output.splitlines())


@contextlib.contextmanager
def program(
    folder: Path, *modules: str, **options: object
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], list[int]]]]:
    """Run a program with two ranks that never end. Yield it, and a function of its descendants.

    Descendants are found by a variable in their environment, for they have sessions of their own.
    """
    mark = f"SHOAL_TEST_MARK={uuid.uuid4()}"

    environ = dict([*os.environ.items(), mark.split("=")])
    command = [sys.executable, never_ending_program.__file__, str(folder), *modules]
    with subprocess.Popen(  # type: ignore[call-overload]
        command, env=environ, start_new_session=True, **options
    ) as process:
        try:
            yield process, lambda: marked(mark)
        finally:
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_another_system_than_linux_is_refused_with_the_way_to_start_there(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match=r"on Linux alone, and this is darwin\. .* torchrun"):
        local.run(launch_targets.rank, (), 2)


@pytest.mark.slow
def test_ctrl_c_on_the_foreground_group_leaves_no_process(tmp_path):
    with program(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as (
        process,
        descendants,
    ):
        until(lambda: len(ready(tmp_path)) == 2)
        assert len(descendants()) >= 6  # itself, the server, two ranks, two workers
        os.killpg(process.pid, signal.SIGINT)
        assert (wordless(process), process.returncode) == (True, 130)
        until(lambda: not descendants())


WAITING_MODULE = """
import os
import time
from pathlib import Path

folder = Path(__file__).parent
os.register_at_fork(after_in_child=lambda: (folder / f"{os.getpid()}.forked").touch())
(folder / "importing").touch()
while not (folder / "interrupted").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_imports_starts_no_rank_and_leaves_no_process(
    tmp_path, monkeypatch, number, code
):
    (tmp_path / "waiting_module.py").write_text(WAITING_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with program(tmp_path, "waiting_module", stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as (
        process,
        descendants,
    ):
        until((tmp_path / "importing").exists)
        os.killpg(process.pid, number)
        (tmp_path / "interrupted").touch()
        assert (process.communicate()[0], process.returncode) == (b"", code)
        until(lambda: not descendants())
    assert len(list(tmp_path.glob("*.forked"))) <= 1  # the process that serves torch's store


def test_a_launcher_that_is_killed_takes_ranks_workers_and_server_with_it(tmp_path):
    with program(tmp_path) as (process, descendants):
        until(lambda: len(ready(tmp_path)) == 2)
        process.kill()
        until(lambda: not descendants())


def states(pids: list[str]) -> str:
    """Return the state of each process, one letter each."""
    return "".join(Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0] for pid in pids)


@pytest.mark.slow
def test_ranks_stop_and_continue_with_their_launcher(tmp_path):
    terminal, inner = pty.openpty()
    with program(tmp_path, stdout=inner, stderr=inner) as (process, _):
        os.close(inner)
        until(lambda: len(ready(tmp_path)) == 2)
        pids = [str(process.pid), *(pid for pid, _ in ready(tmp_path))]
        process.send_signal(signal.SIGTSTP)
        until(lambda: states(pids) == "TTT")
        process.send_signal(signal.SIGCONT)
        until(lambda: "T" not in states(pids))
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    os.close(terminal)
    assert [terminal for _, terminal in ready(tmp_path)] == ["True", "False"]
