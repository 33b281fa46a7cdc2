"""Targets and scripts that make worlds at addresses, and in processes, of their own."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ELSEWHERE = "tcp://127.0.0.1:29500"  # nobody listens there


def sum_of_ones(rank: int, size: int, **where: str) -> int:
    """Join a world, add up ones, and leave it."""
    dist.init_process_group("gloo", rank=rank, world_size=size, **where)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return int(ones)


def joins_worlds_at_addresses_of_its_own(folder: str, url: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sums = [sum_of_ones(rank, size, init_method=url) for _ in range(2)]
    sums.append(sum_of_ones(0, 1, init_method=url))
    sums.append(sum_of_ones(rank, size))  # the launcher's own
    os.environ["MASTER_PORT"] = "12355"
    sums.append(sum_of_ones(rank, size))
    half = rank % 2  # ranks 0 and 2, and ranks 1 and 3
    sums.append(sum_of_ones(rank // 2, size // 2, init_method=f"tcp://localhost:{29501 + half}"))
    with open(os.path.join(folder, f"sums.{rank}"), "w") as file:
        file.write(repr(sums))


def work(local: int, nprocs: int, url: str, folder: str, launched: bool) -> None:
    """Join a world of all processes, or of those of one rank of the launcher."""
    first = nprocs * int(os.environ["RANK"]) if launched else 0
    size = nprocs * int(os.environ["WORLD_SIZE"]) if launched else nprocs
    summed = sum_of_ones(first + local, size, init_method=url)
    with open(os.path.join(folder, f"sum.{first + local}"), "w") as file:
        file.write(str(summed))


def main() -> None:
    how, folder = sys.argv[1:]
    if how == "spawn":
        mp.spawn(work, args=(2, ELSEWHERE, folder, False), nprocs=2)
    elif how == "spawn in all":
        mp.spawn(work, args=(2, ELSEWHERE, folder, True), nprocs=2)
    else:
        context = mp.get_context(how)
        arguments = (2, ELSEWHERE, folder, False)
        children = [context.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        sys.exit(max(child.exitcode for child in children))


if __name__ == "__main__":
    main()
