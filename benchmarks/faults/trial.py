"""One trial: a run on two ranks that meets a fault, and the bits that it ends with."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.watched_training import WatchedTraining
from shoal.train.checkpoint import newest, tensor_files

DATA = Path(__file__).with_name("faulty_data.py")
RANKS, STEPS, LIMIT_S, TRIAL_S = 2, 80, 3.0, 120.0
SETTINGS = {
    "import": str(DATA),
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
SERVERS = {
    "server": "server=2,lease_s=0.5",
    "server, 2 replicas": "server=2,replicas=2,lease_s=0.5",
}


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial.

    Attributes:
        held: the run ended by itself, with the bits of a run without a fault.
        told: the line of stderr that names the fault; empty if there is none.
        told_s, step_s: seconds from the fault until it was told, and until a step was done.
    """

    fault: str
    strategy: str
    seed: int
    held: bool
    code: int | None
    told: str
    told_s: float | None
    step_s: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class FaultyRun(WatchedTraining):
    """`shoal train` in a folder with orders of faults."""

    def __init__(self, folder: Path, strategy: str, settings: Mapping[str, object]) -> None:
        job = folder / "job.yaml"
        job.write_text("name: faulty\n")
        words = ["-n", str(RANKS), str(job), "--strategy", strategy]
        words += [word for pair in settings.items() for word in (f"--{pair[0]}", str(pair[1]))]
        super().__init__(folder / "run", words, {"FAULTS": str(folder)})

    def digest(self) -> str:
        """Return a digest of all tensors of the last checkpoint, those of each rank included."""
        last = newest(self.directory / "checkpoints")
        if last is None:
            return ""
        digest = hashlib.sha256()
        for name, tensor in sorted(tensor_files.read(last, lambda _: True).items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> int | None:
        """Return the exit code; None if the run had to be killed."""
        code = self.process.poll()
        self.end(signal.SIGKILL)
        return code


def undisturbed(strategy: str, settings: Mapping[str, object]) -> str:
    """Return the digest of a run without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        run = FaultyRun(Path(folder), strategy, {**SETTINGS, **settings})
        run.process.wait(TRIAL_S)
        if run.close() != 0:
            raise SystemExit(run.text())
        return run.digest()


def make_trial(
    fault: str,
    strategy: tuple[str, str],
    seed: int,
    order: Mapping[str, int],
    settings: Mapping[str, object],
    expected: str,
) -> Trial:
    """Run once with a fault.

    Args:
        strategy: its name in the table, and its text.
        order: the rank and the step of the fault.
        expected: the digest of a run without a fault.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"order.{order['rank']}")
        path.write_text(json.dumps({"fault": fault, "step": order["step"]}))
        run = FaultyRun(Path(folder), strategy[1], {**SETTINGS, **settings})
        told, step_s = _watch(run, Path(folder, "met"))
        code = run.close()
        since_s = _met_s(Path(folder, "met"))
        told = told or run.first(r"restart \d+ of|is slow")
        held = code == 0 and run.digest() == expected and since_s is not None
        if fault == "slow":
            held = held and told is not None and f"rank {order['rank']} of" in told[1]
        if not held:
            print(run.text()[-3000:], file=sys.stderr)
    return Trial(
        fault,
        strategy[0],
        seed,
        held,
        code,
        told[1].strip() if told else "",
        None if told is None or since_s is None else told[0] - since_s,
        None if step_s is None or since_s is None else step_s - since_s,
    )


def _watch(run: FaultyRun, met: Path) -> tuple[tuple[float, str] | None, float | None]:
    """Wait for the end of a run. Return the line that tells, and the time of the next step.

    Steps that were done before the fault are done again after a restart. The next step is the first
    one that is done after the run has resumed, or after the fault where it goes on in place.
    """
    end_s = time.monotonic() + TRIAL_S
    told = step_s = None
    while run.process.poll() is None and time.monotonic() < end_s:
        time.sleep(0.01)
        if told is None and met.exists():
            told = run.first(r"restart \d+ of")
        if step_s is None and told is not None:
            resumed = run.first("resumed from")
            found = re.search(r"step-(\d+)", resumed[1]) if resumed else None
            if found is not None and run.step() > int(found[1]):
                step_s = time.monotonic()
    return told, step_s


def _met_s(path: Path) -> float | None:
    return float(path.read_text()) if path.exists() and path.read_text() else None
