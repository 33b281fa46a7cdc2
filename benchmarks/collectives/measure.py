"""Measures all candidates in turns, in the same processes, and writes result.json. Run it by `make
bench-collectives`.

    64 KB, round 1   Gloo  shoal  memcpy  Open MPI  by hand     equal numbers of calls, a barrier
    64 KB, round 2   shoal  by hand  Gloo  memcpy  Open MPI     before each; a new order each round

Called without arguments it starts itself under mpirun, or as plain processes where there is none,
for every number of
ranks. Horovod has processes of its own, beside `shoal` and Gloo: its thread in each of them looks
around a thousand times a second, and whoever waits for a processor notices."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shoal  # noqa: F401 - the backend
from benchmarks.collectives import steps
from benchmarks.collectives.candidates import ALL, Candidate, all_that_there_are
from benchmarks.report_page import circumstances, write_result

RESULT = Path(__file__).with_name("result.json")
RANKS = (2, 4)
BESIDE_HOROVOD = ("shoal", "Gloo", "Horovod")
CREWS = {
    "times_s": tuple(name for name in ALL if name != "Horovod"),
    "beside_horovod_s": BESIDE_HOROVOD,
}
SIZES_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 26, 1 << 28)
TURN_BYTES = 1 << 26  # how much a candidate reduces in one turn, about
MOST_CALLS = 100
PORT = "29577"
SLOW = ("Gloo", "Horovod")  # make fewer calls in a turn, or all the time would be theirs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest-mb", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--crew", choices=CREWS, help="be one rank, of these candidates")
    parser.add_argument("--part", type=Path, help="and write here")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.part:
        measure(options.part, options.crew, options.rounds, options.largest_mb << 20)
        return
    facts = circumstances(("torch", "shoal"))
    parts = {str(ranks): _start(ranks, options) for ranks in options.ranks}
    write_result(options.out, {"circumstances": facts, "ranks": parts})


def _start(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"missing": {}}
    for crew in CREWS:
        part = options.out.with_suffix(f".{ranks}.json")
        words = (
            f"--crew={crew}",
            f"--rounds={options.rounds}",
            f"--largest-mb={options.largest_mb}",
        )
        own = start_ranks(ranks, part, "benchmarks.collectives.measure", *words)
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{PORT}_*"):
            left.unlink()
        found["missing"] |= own.pop("missing")
        found |= own
    return found


def start_ranks(ranks: int, part: Path, module: str, *arguments: str) -> Any:
    """Run a module as so many ranks, under mpirun where there is one. Return what rank 0 wrote."""
    program = [sys.executable, "-m", module, f"--part={part}", *arguments]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    environment["OMP_NUM_THREADS"] = "1"
    if shutil.which("mpirun"):
        idle = "1" if ranks > (os.cpu_count() or 1) else "0"
        mpirun = (
            f"mpirun -n {ranks} --oversubscribe --bind-to none --mca mpi_yield_when_idle {idle}"
        )
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        subprocess.run([*mpirun.split(), *root, *program], env=environment, check=True)
    else:
        numbers = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
        processes = [subprocess.Popen(program, env=environment | number) for number in numbers]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank has failed")
    found = json.loads(part.read_text())
    part.unlink()
    return found


def be_a_rank() -> None:
    """Meet the other ranks of `start_ranks`, over Gloo. Collective."""
    torch.set_num_threads(1)
    os.environ.setdefault("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    os.environ.setdefault("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))


def measure(part: Path, crew: str, rounds: int, largest_bytes: int) -> None:
    """One rank's part; rank 0 writes."""
    be_a_rank()
    candidates, missing = all_that_there_are(CREWS[crew], largest_bytes)
    tensor, chance = torch.zeros(largest_bytes // 4), random.Random(0)
    _agree(candidates, tensor[:1000])
    times_s: dict[str, dict[str, list[float]]] = {}
    for size_bytes in (size for size in SIZES_BYTES if size <= largest_bytes):
        own: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        calls = min(MOST_CALLS, max(1, TURN_BYTES // size_bytes))
        count = rounds if size_bytes < 1 << 26 else max(3, rounds // 3)
        for turn in range(count + 1):  # the first does not count
            for candidate in chance.sample(candidates, len(candidates)):
                few = calls if candidate.name not in SLOW else max(1, calls // 5)
                time_s = _turn(candidate, few, tensor[: size_bytes // 4])
                if turn:
                    own[candidate.name].append(time_s)
        times_s[str(size_bytes)] = {name: _slowest(times) for name, times in own.items()}
    found: dict[str, Any] = {"missing": missing, crew: times_s}
    if crew == "times_s":
        found |= {"step_s": steps.measure(rounds)}
    if dist.get_rank() == 0:
        part.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _turn(candidate: Candidate, calls: int, tensor: torch.Tensor) -> float:
    """The time of one call, in seconds."""
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(calls):
        candidate.reduce(tensor)
    return (time.perf_counter() - begin_s) / calls


def _agree(candidates: list[Candidate], tensor: torch.Tensor) -> None:
    """All must come to the same sum; a copy reduces nothing."""
    for candidate in candidates:
        tensor.fill_(dist.get_rank() + 1)
        candidate.reduce(tensor)
        expected = sum(range(dist.get_world_size() + 1))
        assert candidate.name == "memcpy" or (tensor == expected).all(), candidate.name
    tensor.zero_()


def _slowest(times_s: list[float]) -> list[float]:
    slowest = torch.tensor(times_s, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


if __name__ == "__main__":
    main()
