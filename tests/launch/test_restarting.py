"""Restarts of ranks: after a loss, and on another number of ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import restart_targets

from shoal.errors import LaunchError, UsageError
from shoal.launch.control_channel import NAME, ControlServer, request
from shoal.launch.restarting import RestartingRun, Work
from tests.harness.waiting import until


def saved_step(folder: Path) -> int | None:
    return max((int(path.suffix[1:]) for path in folder.glob("saved.*")), default=None)


def run(
    folder: Path,
    target: Callable[..., None],
    *arguments: Any,
    processes: int = 2,
    restarts: int = 3,
    asked: Callable[[], object] = lambda: None,
) -> int:
    class Job(Work):
        def saved_step(self) -> int | None:
            asked()
            return saved_step(folder)

    first = (str(folder), "first", *arguments)
    again = (str(folder), "again", *arguments)
    name, can = f"restart_targets:{target.__name__}", restart_targets.takes_even_numbers
    work = Job(name, first, again, {}, "first", (), check=can)
    (folder / "claimed").touch()
    with ControlServer(folder, "claimed") as control:
        return RestartingRun(work, processes, control, restarts).run()


def starts(folder: Path, rank: int = 0) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob(f"start.*.{rank}"))]


def test_after_a_killed_rank_all_start_again_from_the_checkpoint(tmp_path, capfd):
    asked: list[list[str]] = []
    target = restart_targets.dies, signal.SIGKILL, 1, True
    assert run(tmp_path, *target, asked=lambda: asked.append(starts(tmp_path))) == 0
    # On several hosts the question would swallow what ranks say: it comes before they start.
    assert asked == [["first of 2"]]
    assert starts(tmp_path, 0) == starts(tmp_path, 1) == ["first of 2", "again of 2"]
    assert capfd.readouterr().err == (
        "note: rank 1 of 2 was killed by SIGKILL (out of memory?); 2 processes start from the "
        "checkpoint of "
        "step 1 (restart 1 of 3)\n"
    )
    assert not (tmp_path / NAME).exists()


def test_after_the_last_restart_the_loss_is_reported(tmp_path, capfd):
    assert (
        run(tmp_path, restart_targets.dies, signal.SIGABRT, 9, True, restarts=2)
        == 128 + signal.SIGABRT
    )
    assert len(starts(tmp_path)) == 3
    printed = capfd.readouterr().err
    assert "note: it was started again 2 times; that is all (--restarts 2)\n" in printed
    assert printed.endswith("rank 1 of 2 was killed by SIGABRT\n")


def test_the_same_loss_without_a_checkpoint_in_between_ends_the_run(tmp_path, capfd):
    assert run(tmp_path, restart_targets.dies, signal.SIGKILL, 9, False) == 128 + signal.SIGKILL
    assert len(starts(tmp_path)) == 2
    printed = capfd.readouterr().err
    assert "start from the beginning, for there is no checkpoint (restart 1 of 3)\n" in printed
    assert "note: the same again, and no checkpoint in between" in printed
    assert printed.endswith("\nrank 1 of 2 was killed by SIGKILL (out of memory?)\n")


def test_a_program_that_is_wrong_is_not_started_again(tmp_path, capfd):
    assert run(tmp_path, restart_targets.is_wrong, processes=1) == 1
    assert len(starts(tmp_path)) == 1
    assert capfd.readouterr().err.endswith("ValueError: always wrong\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_was_asked_to_end_is_not_started_again(tmp_path, capfd, number):
    assert run(tmp_path, restart_targets.dies, number, 1, True) == 128 + number
    assert len(starts(tmp_path)) == 1


def test_a_lost_shard_of_the_servers_is_a_loss(tmp_path, capfd):
    assert run(tmp_path, restart_targets.loses_a_shard, processes=1) == 0
    assert capfd.readouterr().err == (
        "note: shard 0 of the parameter servers is lost: it is gone; 1 process starts from the "
        "beginning, for "
        "there is no checkpoint (restart 1 of 3)\n"
    )


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as refused:
        next(request(folder, scale=6))
    return str(refused.value)


class Commands(threading.Thread):
    """A thread that sends commands to the run of this process; `errors` has its exceptions."""

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__()
        self.target, self.errors = target, []
        self.start()

    def run(self) -> None:
        try:
            self.target()
        except BaseException as error:  # noqa: BLE001 - it is the test's
            self.errors.append(error)
            if (
                signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            ):  # the run is there, and must not go on for ever
                os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        self.join()
        assert self.errors == []


def test_a_run_is_scaled_while_it_trains(tmp_path, capfd):
    def commands() -> None:
        until(lambda: len(list(tmp_path.glob("start.1.*"))) == 2 and (tmp_path / NAME).exists())
        assert list(request(tmp_path, scale=4)) == [{"stopping": 2}, {"processes": 4, "step": 1}]
        until(lambda: len(list(tmp_path.glob("start.*"))) == 2 + 4)
        (tmp_path / "end").touch()

    thread = Commands(commands)
    assert run(tmp_path, restart_targets.stops_when_told) == 0
    thread.end()
    assert starts(tmp_path) == ["first of 2", "again of 4"]
    assert capfd.readouterr().err == (
        "note: 2 stopped for `shoal scale`; 4 processes start from the checkpoint of step 1\n"
    )


REFUSED = {
    0: "0 processes were asked for; at least one is needed",
    2: "it has 2 processes already",
    5: "5 is odd; take an even number",
    True: "no request that its launcher knows",
    "4": "no request that its launcher knows",
    None: "no request that its launcher knows",
}


def test_an_impossible_request_is_refused_before_ranks_stop(tmp_path, capfd):
    def commands() -> None:
        until(lambda: len(list(tmp_path.glob("start.1.*"))) == 2 and (tmp_path / NAME).exists())
        for processes, reason in REFUSED.items():
            with pytest.raises(UsageError, match=reason):
                list(request(tmp_path, scale=processes))
        with pytest.raises(UsageError, match="its servers are on this machine"):
            list(request(tmp_path, secret=True))
        (tmp_path / "end").touch()

    thread = Commands(commands)
    assert run(tmp_path, restart_targets.stops_when_told) == 0
    thread.end()
    assert starts(tmp_path) == ["first of 2"]
    assert capfd.readouterr().err == ""


def test_while_ranks_stop_another_command_is_refused(tmp_path, capfd):
    def commands() -> None:
        until(lambda: len(list(tmp_path.glob("start.1.*"))) == 2 and (tmp_path / NAME).exists())
        answers = request(tmp_path, scale=4)
        assert next(answers) == {"stopping": 2}
        with pytest.raises(UsageError, match="stopping already, to go on as 4"):
            next(request(tmp_path, scale=6))
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: "it was told to stop" in refusal(tmp_path))
        until(lambda: len(list(tmp_path.glob("told.*"))) == 2)
        (tmp_path / "saved").touch()
        with pytest.raises(UsageError, match="it has ended before it could go on"):
            next(answers)

    thread = Commands(commands)
    assert run(tmp_path, restart_targets.saves_slowly) == 75
    thread.end()
    assert starts(tmp_path) == ["first of 2"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_a_signal_to_the_launcher_ends_ranks_that_were_started_again(tmp_path, capfd, number, code):
    def commands() -> None:
        until(lambda: len(list(tmp_path.glob("start.2.*"))) == 2)
        os.kill(os.getpid(), number)

    thread = Commands(commands)
    assert run(tmp_path, restart_targets.dies_once_and_sleeps) == code
    thread.end()
    assert starts(tmp_path) == ["first of 2", "again of 2"]


def test_the_socket_of_a_killed_launcher_is_no_launcher(tmp_path):
    with ControlServer(tmp_path, "") as listening:
        listening.open()
        (tmp_path / NAME).rename(tmp_path / "left")
    (tmp_path / "left").rename(tmp_path / NAME)  # as a launcher that was killed leaves it
    with pytest.raises(LaunchError, match="no launcher on this machine"):
        next(request(tmp_path, scale=2))
