"""`--import faulty_data.py`: ranks that meet a fault once, after a given number of steps.

The file `order.RANK` in the directory FAULTS, JSON, says which fault this rank meets and after
which step. The rank takes it away first, so that it meets it once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from shoal.config.job import DataConfig
from shoal.data.source import Source
from shoal.parameter_server.launcher import server_pool

FOLDER = Path(os.environ["FAULTS"])
SLOW_S = 0.03


class Moment:
    """Counts the steps of this rank, and lets the fault happen in the pass after one of them."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = {}
        self.steps = 0
        self.pools: list[server_pool.ServerPool] = []
        path = FOLDER / f"order.{os.environ['RANK']}"
        if path.exists():
            self.order = json.loads(path.read_text())
            path.rename(FOLDER / f"taken.{os.environ['RANK']}")
            register_optimizer_step_post_hook(self.on_step)
            register_module_forward_pre_hook(self.on_forward)
            self._watch_pools()

    @property
    def is_there(self) -> bool:
        return bool(self.order) and self.steps >= self.order["step"]

    def on_step(self, *_: object) -> None:
        self.steps += 1

    def on_forward(self, *_: object) -> None:
        if self.is_there and self.order["fault"] != "data blocks":
            self.meet()

    def meet(self) -> None:
        """Let the fault happen, and note the time just before."""
        fault = self.order["fault"]
        if fault == "slow":
            time.sleep(SLOW_S)
            self.note()
            return
        self.note()
        self.order = {}
        FAULTS[fault](self)

    def note(self) -> None:
        path = FOLDER / "met"
        if not path.exists():
            path.write_text(str(time.monotonic()))

    def _watch_pools(self) -> None:
        begin = server_pool.ServerPool.__init__
        pools = self.pools

        def remember(pool: Any, *args: Any, **kwargs: Any) -> None:
            begin(pool, *args, **kwargs)
            pools.append(pool)

        server_pool.ServerPool.__init__ = remember  # type: ignore[method-assign]

    @property
    def pool(self) -> Any:
        return self.pools[0]

    def server(self) -> int:
        """Return the process of the first server of shard 0."""
        return min(pid for pid, config in self.pool.servers.items() if config.shard == 0)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def holds_the_interpreter(_: Moment) -> None:
    ctypes.PyDLL(None).sleep(1000)


def kill_worker(_: Moment, number: int) -> None:
    """Signal a data-loader worker of this rank, once there is one."""
    while True:
        for pid in children(os.getpid()):
            name = Path(f"/proc/{pid}/comm")
            if name.exists() and name.read_text().strip() == "pt_data_worker":
                os.kill(pid, number)
                return
        time.sleep(0.001)


def kill_spawner_and_coordinator(moment: Moment) -> None:
    coordinator = moment.pool.coordinator.pid
    os.kill(moment.pool.spawner._pid, signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)


def kill_rank_and_server(moment: Moment) -> None:
    os.kill(moment.server(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Any] = {
    "rank killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "rank crashes (SIGSEGV)": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "rank stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "rank sleeps in a step": lambda _: time.sleep(1000),
    "rank in C, interpreter locked": holds_the_interpreter,
    "data blocks": lambda _: time.sleep(1000),
    "loader worker killed": lambda moment: kill_worker(moment, signal.SIGKILL),
    "loader worker stopped": lambda moment: kill_worker(moment, signal.SIGSTOP),
    "fork server killed": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "spawner killed": lambda moment: os.kill(moment.pool.spawner._pid, signal.SIGKILL),
    "spawner and coordinator killed": kill_spawner_and_coordinator,
    "coordinator killed": lambda moment: os.kill(moment.pool.coordinator.pid, signal.SIGKILL),
    "server killed": lambda moment: os.kill(moment.server(), signal.SIGKILL),
    "server stopped": lambda moment: os.kill(moment.server(), signal.SIGSTOP),
    "rank and server killed": kill_rank_and_server,
}


class Samples(Dataset[tuple[Tensor, int]]):
    """Random images; one comes never, if that is the fault."""

    def __init__(self, count: int, seed: int, moment: Moment | None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 1, 4, 4, generator=generator)
        self.labels = torch.randint(4, (count,), generator=generator).tolist()
        self.moment = moment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        moment = self.moment
        if moment is not None and moment.is_there and moment.order["fault"] == "data blocks":
            moment.meet()
        return self.images[index], self.labels[index]


def load(config: DataConfig, seed: int) -> Source:
    train = Samples(config.samples, seed, Moment())
    return Source(train, Samples(16, seed + 1, None), "classification", 4, (1, 4, 4))


data = {"faulty": load}
