"""`shoal train` that meets a fault, on this host or on three hosts that share a disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.watched_training import WatchedTraining
from shoal.checkpoint import newest, tensor_files

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/hosts"))  # hosts as namespaces
DATA = Path(__file__).with_name("faulty_data.py")
STEPS, LIMIT_S = 80, 3.0
SETTINGS = {
    "plugin": str(DATA),
    "data.name": "faulty",
    "data.samples": 256,
    "model.name": "mlp",
    "model.options.hidden": "[16, 16]",
    "train.batch_size": 16,
    "train.epochs": STEPS // 16,
    "checkpoint.every_steps": 8,
    "log.every": 1,
    "log.tensorboard": "false",
    "train.hang_limit_s": LIMIT_S,
}
CLEAR_S = 10.0


class FaultyRun(WatchedTraining):
    """The command in a folder with orders of faults.

    Args:
        folder: with the orders; on three hosts the directory that all see.
        strategy: its line.
        counts: the number of ranks of each host.
        settings: besides SETTINGS.
        place: three hosts, a `namespaces.Hosts`; None for this one.
        chosen: the number of the host that meets the fault, from 1.
    """

    def __init__(
        self,
        folder: Path,
        strategy: str,
        counts: Sequence[int],
        settings: Mapping[str, object],
        place: Any = None,
        chosen: int = 1,
    ) -> None:
        self.folder, self.place, self.chosen = folder, place, chosen
        job = folder / "job.yaml"
        job.write_text("name: faulty\n")
        directory = folder / "run"
        pairs = {**SETTINGS, **settings}.items()
        words = [str(job), "--strategy", strategy]
        words += [word for name, value in pairs for word in (f"--{name}", str(value))]
        own = {"FAULTS": str(folder), "FAULTS_RUN": str(directory), "PYTHONPATH": str(ROOT)}
        if place is None:
            super().__init__(directory, ["-n", str(counts[0]), *words], own)
            return
        listed = ",".join(f"node{host}:{count}" for host, count in enumerate(counts, 1))
        words += ["--hosts", listed]
        if strategy.startswith("server"):
            (folder / "servers").mkdir(mode=0o700, exist_ok=True)
            own["SHOAL_SERVER_DIRECTORY"] = str(folder / "servers")
        words += [word for pair in own.items() for word in ("--env", "=".join(pair))]
        enter = [*place.desk.enter(), "sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
        super().__init__(directory, words, place.environment(place.desk, **own), enter)

    def pids(self) -> list[int]:
        """Return all processes of the run, on all hosts."""
        mark = f"FAULTS={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        if self.place is None:
            return found
        nodes = [pid for host in self.place.nodes for pid in host.pids() - host.first_pids]
        return sorted({*found, *nodes} - {self.process.pid})

    def command_pid(self) -> int:
        """Return the process of the command itself."""
        if self.place is None:
            return self.process.pid
        pids: list[int] = self.place.desk.pids()
        for pid in pids:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if line.split(b"\0")[1:3] == [b"-m", b"shoal"]:
                    return pid
        raise AssertionError("no command")

    def acted(self) -> None:
        """Let the rank that waits for a fault from outside train on."""
        (self.folder / "acted").touch()

    def is_clear(self) -> bool:
        """Wait until no process of the run is left on any host; False if that takes too long."""
        end_s = time.monotonic() + CLEAR_S
        # A session of the ssh server may wait for TCP; it holds nothing.
        while any(_is_python(pid) for pid in self.pids()):
            if time.monotonic() > end_s:
                return False
            time.sleep(0.05)
        return True

    def outcome(self, is_exact: bool) -> str:
        """Return a digest of all tensors of the last checkpoint, those of each rank included.

        Where steps are stale their bits differ from run to run: then the step, and that all is
        finite.
        """
        last = newest(self.directory / "checkpoints")
        if last is None:
            return ""
        tensors = tensor_files.read(last, lambda _: True)
        if not is_exact:
            floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
            return f"{last.name} {all(torch.isfinite(tensor).all() for tensor in floats)}"
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> int | None:
        """Return the exit code; None if the run had to be killed."""
        code = self.process.poll()
        if code is None:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.end(signal.SIGKILL)
        return code


def _is_python(pid: int) -> bool:
    """Return True for a process of Shoal that is alive; a zombie has no command line."""
    with contextlib.suppress(OSError):
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
