"""Measure how long a save stops training, in one interleaved run on 2 ranks; then the memory of an
export, by `memory`. Run it by `make bench-checkpoint`.

    round    torch.save │ Shoal, waiting │ Shoal, overlapped: copy ─ steps, a thread writes ─ wait

Each saves the same state, a GPT and its AdamW moments under ddp, to the same disk, and fsyncs it:
torch.save over its own file, and once more to a new one, after which the older one is removed as
ours is. They change places in each round: what follows gets memory that the one before has freed,
which a virtual machine need not fetch from its host."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint import memory
from benchmarks.checkpoint.training import RANKS, ROUNDS, training
from benchmarks.report_page import circumstances, write_result
from shoal.checkpoint import AsyncSaver, Checkpoints
from shoal.testing import world

RESULT = Path(__file__).with_name("result.json")


def measured(folder: Path) -> dict[str, list[float]]:
    """Seconds of every round, those of the processor on the busiest rank, and bytes."""
    run, steps = training("ddp")
    waiting = Checkpoints(folder / "waiting", keep=1)
    beside = Checkpoints(folder / "beside", keep=1, group=run.mesh.new_group())
    background = AsyncSaver(beside)
    found: dict[str, list[float]] = {}

    def note(number: int, what: str, action: Callable[[], object]) -> None:
        dist.barrier()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        action()
        busiest = torch.tensor(time.process_time() - cpu_s, dtype=torch.float64)
        dist.barrier()
        ended_s = time.perf_counter()
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        if number > 1:
            found.setdefault(what, []).append(ended_s - started_s)
            found.setdefault(f"{what}, processor", []).append(busiest.item())

    def in_turns(number: int, *actions: tuple[str, Callable[[], object]]) -> None:
        first = number % len(actions)
        for what, action in actions[first:] + actions[:first]:
            note(number, what, action)

    for number in range(1, ROUNDS + 1):
        note(number, "steps", steps)
        tensors, info, private = run.state()
        over, new = partial(int), partial(int)
        if run.rank == 0:
            over = partial(_torch_save, folder / "plain.pt", tensors)
            new = partial(_save_to_new_file, folder, number, tensors)
        in_turns(
            number,
            ("torch.save", over),
            ("torch.save, new file", new),
            ("waiting", partial(waiting.save, number, tensors, info, private)),
        )
        note(
            number,
            "beside, stall",
            partial(background.start, number, tensors, info, private, best=False),
        )
        note(number, "beside, steps meanwhile", steps)
        note(number, "beside, the rest", background.wait)
        in_turns(
            number,
            ("restore", partial(waiting.load, print)),
            ("torch.load", partial(torch.load, folder / "plain.pt", weights_only=True)),
        )
    background.close()
    found["bytes, torch.save"] = [os.path.getsize(folder / "plain.pt")]
    found["bytes, Shoal"] = [
        sum(f.stat().st_size for f in (folder / "waiting").rglob("*") if f.is_file())
    ]
    found["bytes, tensors"] = [sum(t.numel() * t.element_size() for t in tensors.values())]
    return found


def _torch_save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _save_to_new_file(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    """Save as a script does that is never without a checkpoint: then remove the one before."""
    _torch_save(folder / f"plain-{number}.pt", tensors)
    (folder / f"plain-{number - 1}.pt").unlink(missing_ok=True)


def main() -> None:
    facts = circumstances(("torch", "shoal"))
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        found = world.run(RANKS, measured, Path(folder), timeout_s=600)[0]
        bytes_above = memory.measured(Path(folder))
    write_result(RESULT, {"circumstances": facts, "found": found, "memory": bytes_above})


if __name__ == "__main__":
    main()
