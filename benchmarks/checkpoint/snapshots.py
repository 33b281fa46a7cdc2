"""Measure how long a snapshot in memory stops training, on 2 ranks. Run it by `python -m`.

    round    3 steps │ a snapshot │ a checkpoint │ a snapshot beside 3 steps: copy ─ steps ─ wait

Every candidate keeps the same state, a GPT and its AdamW moments. "Two hosts" are two directories
on one machine, each with a copy of the other's part that goes over the loopback interface."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist

from benchmarks.checkpoint.training import RANKS, ROUNDS, training
from benchmarks.report_page import circumstances, fill, table, told
from shoal.launch.snapshot_memory import SnapshotMemory
from shoal.testing import world
from shoal.train.checkpoint import AsyncSaver, Checkpoints
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.checkpoint.separate_store import SeparateCheckpoints

RESULT = Path(__file__).with_name("snapshots.json")
ROWS = {
    "steps": "three steps, undisturbed",
    "snapshot, one host": "a snapshot in the memory of one host: training stands still",
    "snapshot, two hosts": "with a copy on another host, over the loopback interface",
    "checkpoint on the disk": "a checkpoint on the disk",
    "beside, stall": "**a snapshot beside training: the stall**",
    "beside, steps meanwhile": "three steps beside it",
    "restore": "restore from memory, every byte compared",
}


def measured(strategy: str, disk: Path, memory: Path) -> dict[str, list[float]]:
    """Return the seconds of every round, and the bytes of one snapshot."""
    run, steps = training(strategy)
    disks = HostDisks((0, 1), copies=1)
    own = memory / f"host{run.rank}"
    one_host = Checkpoints(memory / "waiting", keep=1)
    two_hosts = SeparateCheckpoints(own, disks, keep=1)
    on_disk = Checkpoints(disk / strategy, keep=1)
    beside = AsyncSaver(Checkpoints(memory / "beside", keep=1, group=run.mesh.new_group()))
    found: dict[str, list[float]] = {}

    def note(number: int, what: str, action: Callable[[], object]) -> None:
        dist.barrier()
        started_s = time.perf_counter()
        action()
        dist.barrier()
        if number > 1:
            found.setdefault(what, []).append(time.perf_counter() - started_s)

    for number in range(1, ROUNDS + 1):
        note(number, "steps", steps)
        note(number, "state", run.state)
        tensors, info, private = run.state()
        save = number, tensors, info, private
        note(number, "snapshot, one host", partial(one_host.save, *save))
        note(number, "snapshot, two hosts", partial(two_hosts.save, *save))
        note(number, "checkpoint on the disk", partial(on_disk.save, *save))
        note(number, "beside, stall", partial(beside.start, *save, best=False))
        note(number, "beside, steps meanwhile", steps)
        note(number, "beside, the rest", beside.wait)
        note(number, "restore", partial(one_host.load, print))
    beside.close()
    files = (memory / "waiting").rglob("*")
    found["bytes"] = [sum(file.stat().st_size for file in files if file.is_file())]
    return found


def main() -> None:
    facts = circumstances(("torch", "shoal"))
    found = {}
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as disk:
        for strategy in ("ddp", "zero3"):
            with SnapshotMemory() as memory:
                paths = Path(disk), memory.path
                found[strategy] = world.run(RANKS, measured, strategy, *paths, timeout_s=600)[0]
    RESULT.write_text(json.dumps({"circumstances": facts, "found": found}, indent=1) + "\n")
    report(facts, found)


def report(facts: dict[str, str], found: dict[str, dict[str, list[float]]]) -> None:
    """Write the table of snapshots.md."""
    rows = [
        [f"{strategy}: {name}", _spread(seconds[key])]
        for strategy, seconds in found.items()
        for key, name in ROWS.items()
    ]
    size = f"{found['ddp']['bytes'][0] / 2**20:.0f} MiB, the files of both ranks."
    head = [f"median of {ROUNDS - 1} rounds (fastest to slowest)", "seconds"]
    text = "\n\n".join([table(head, rows), f"A snapshot has {size}", told(facts)])
    fill(Path(__file__).with_name("snapshots.md"), text)
    print(text)


def _spread(seconds: list[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
