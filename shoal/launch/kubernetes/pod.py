"""The first program of a pod: it starts the pod's ranks, and ends with them.

    python -m shoal.launch.kubernetes.pod --pods 4 --ranks 2 [--first] -- SCRIPT ARGUMENTS
    python -m shoal.launch.kubernetes.pod --pods 4 --ranks 2 -- -m shoal train digits

JOB_COMPLETION_INDEX, which Kubernetes sets, is the pod's number. MASTER_ADDR and MASTER_PORT come
from the JobSet. Every rank gets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE beside them,
which `launchers.environment` reads.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from shoal.launch.rank import EXIT_RESTART

RESOLVE_S = 600.0
"""Limit of the wait for the first pod's name: it has one when its node has been found."""
POLL_S = 0.1
END_S = 10.0
"""From the request to end, after another rank has failed, until a rank is killed."""


def rank_variables(pod: int, pods: int, ranks: int, local_rank: int) -> dict[str, str]:
    """Return the variables of one of a pod's ranks."""
    return {
        "RANK": str(pod * ranks + local_rank),
        "WORLD_SIZE": str(pods * ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def main(words: Sequence[str]) -> int:
    """Start the ranks, wait for their end, and return the pod's exit code.

    It is 0; 75 if ranks stopped with 75 and none failed; else that of the rank that failed first,
    128 + n for signal n.
    """
    parser = argparse.ArgumentParser(prog="pod")
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--first", action="store_true", help="show stdout of rank 0 alone")
    end = list(words).index("--")
    options = parser.parse_args(words[:end])
    pod = os.environ.get("JOB_COMPLETION_INDEX", "")
    if not pod.isdecimal() or int(pod) >= options.pods:
        print(
            f"shoal: JOB_COMPLETION_INDEX is '{pod}', which is no pod of {options.pods}. The job "
            "must have completionMode: Indexed",
            file=sys.stderr,
        )
        return 2
    local = LocalRanks()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A pod's first process ignores every signal that it has no handler for.
        signal.signal(number, local.stop)
    if options.pods > 1 and not wait_for_name(os.environ.get("MASTER_ADDR", ""), local):
        return 1 if local.stop_signal is None else 128 + local.stop_signal
    for rank in range(options.ranks):
        variables = rank_variables(int(pod), options.pods, options.ranks, rank)
        local.start(words[end + 1 :], variables, options.ranks, options.first)
    return local.wait()


@dataclass
class LocalRanks:
    """The ranks of a pod.

    Attributes:
        processes: those that were started.
        stop_signal: the last signal that this process got; None before.
    """

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stop_signal: int | None = None

    def start(
        self, program: Sequence[str], variables: Mapping[str, str], ranks: int, first_only: bool
    ) -> None:
        """Start one rank."""
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **variables}
        drops = first_only and variables["RANK"] != "0"
        self.processes.append(
            subprocess.Popen(
                [sys.executable, *program],
                env=environment,
                stdout=subprocess.DEVNULL if drops else None,
            )
        )
        if self.stop_signal is not None:  # it came while ranks were being started
            self.processes[-1].send_signal(self.stop_signal)

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Hand a signal on to all ranks."""
        self.stop_signal = number
        self._send(number)

    def wait(self) -> int:
        """Wait for the end of all ranks, and return the exit code. The first failure ends all."""
        failed: int | None = None
        kill_at = 0.0
        while None in [process.poll() for process in self.processes]:
            if failed is None:
                failed = next(
                    (code for code in self._codes() if code not in (0, EXIT_RESTART)), None
                )
                if failed is not None:
                    self._send(signal.SIGTERM)
                    kill_at = time.monotonic() + END_S
            elif time.monotonic() > kill_at:
                self._send(signal.SIGKILL)
            time.sleep(POLL_S)
        codes = self._codes()
        if failed is None:
            failed = next((code for code in codes if code not in (0, EXIT_RESTART)), None)
        if failed is not None:
            return failed
        return EXIT_RESTART if EXIT_RESTART in codes else 0

    def _codes(self) -> list[int]:
        """Return the exit codes of ranks that have ended, as a shell gives them."""
        codes = [process.returncode for process in self.processes]
        return [code if code >= 0 else 128 - code for code in codes if code is not None]

    def _send(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)  # does nothing to one that has ended


def wait_for_name(name: str, local: LocalRanks) -> bool:
    """Wait until a name has an address; return False at the limit or after a signal.

    torch's store gives up at once if the name is not known yet.
    """
    limit = time.monotonic() + RESOLVE_S
    while local.stop_signal is None:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            if time.monotonic() > limit:
                print(
                    f"shoal: the first pod's name {name} has no address after {RESOLVE_S:.0f} s: "
                    f"{error}. Does the JobSet have network.enableDNSHostnames?",
                    file=sys.stderr,
                )
                return False
            time.sleep(1.0)
        else:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
