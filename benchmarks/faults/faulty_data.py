"""`--plugin faulty_data.py`: ranks that meet a fault once, after a given number of steps.

The file `order.RANK` in the directory FAULTS, JSON, says which fault this rank meets and after
which step. The rank takes it away first, so that it meets it once. A fault that is none of a rank's
is left to the measurement: the rank notes that it has come so far, and waits until it is there.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import Dataset

from benchmarks.faults.rank_faults import RANK_FAULTS
from shoal.config.job import DataConfig
from shoal.data.source import Source
from shoal.parameter_server import launcher
from shoal.watchdog.progress_writer import ProgressWriter

FOLDER = Path(os.environ["FAULTS"])
SLOW_S = 0.03
OUTSIDE_S = 2.0
"""So long a rank waits for a fault from outside; then it trains on."""


class Moment:
    """Counts the steps of this rank, and lets the fault happen in the pass after one of them.

    Attributes:
        folder: of the trial.
        run: the run directory.
    """

    def __init__(self) -> None:
        self.folder, self.run = FOLDER, Path(os.environ["FAULTS_RUN"])
        self.order: dict[str, Any] = {}
        self.steps = 0
        self.pools: list[launcher.ServerPool] = []
        rank = os.environ["RANK"]
        (FOLDER / f"pid.{os.uname().nodename}.{rank}").write_text(str(os.getpid()))
        path = FOLDER / f"order.{rank}"
        if path.exists():
            self.order = json.loads(path.read_text())
            path.unlink()
            if following := self.order.get("then"):
                path.write_text(json.dumps(following))
            register_module_forward_pre_hook(self.on_forward)
            self._watch_steps()
            self._watch_pools()

    @property
    def is_there(self) -> bool:
        return bool(self.order) and self.steps >= self.order["step"]

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
        self.order = {}
        self.note()
        if fault in RANK_FAULTS:
            RANK_FAULTS[fault](self)
        else:
            self._wait_for_the_measurement()

    def note(self) -> None:
        path = FOLDER / "met"
        if not path.exists():
            path.with_suffix(".new").write_text(str(time.monotonic()))
            path.with_suffix(".new").rename(path)

    @staticmethod
    def _wait_for_the_measurement() -> None:
        end_s = time.monotonic() + OUTSIDE_S
        while not (FOLDER / "acted").exists() and time.monotonic() < end_s:
            time.sleep(0.005)

    def _watch_steps(self) -> None:
        end = ProgressWriter.end_step  # of a step of the run; it may have several optimizers

        def count(*args: Any) -> None:
            end(*args)
            self.steps += 1

        ProgressWriter.end_step = count  # type: ignore[method-assign, assignment]

    def _watch_pools(self) -> None:
        begin = launcher.ServerPool.__init__
        pools = self.pools

        def remember(pool: Any, *args: Any, **kwargs: Any) -> None:
            begin(pool, *args, **kwargs)
            pools.append(pool)

        launcher.ServerPool.__init__ = remember  # type: ignore[method-assign, assignment]

    @property
    def pool(self) -> Any:
        return self.pools[0]

    def servers(self) -> list[int]:
        """Return the processes of the servers of shard 0."""
        return sorted(pid for pid, config in self.pool.servers.items() if config.shard == 0)


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
