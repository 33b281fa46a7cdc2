"""A data set whose ranks, or their servers, die once: `--plugin crashing_data.py`.

`data.path` is a directory. The file `fate.RANK` in it, JSON, says what that rank meets: {"part":
"training" or "saving", "point": n}, death at its nth call there; or {"shard": s, "sample": n}, the
death of all servers of shard s when it fetches its nth sample. The rank takes the file away, so
that it meets it once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tiny_data import CLASSES, VALIDATION_SAMPLES, images
from tiny_jobs import Calls
from torch import Tensor
from torch.utils.data import Dataset

from shoal.config.job import DataConfig
from shoal.data.source import Source
from shoal.parameter_server.launcher import ServerPool


class Fatal(Dataset):
    """Kills the servers of `shard` when its nth sample is fetched."""

    def __init__(self, samples: Dataset, shard: int, sample: int) -> None:
        self.samples, self.left = samples, sample
        self.servers: list[int] = []
        start = ServerPool.start

        def remember(fleet: ServerPool, number: int) -> int:
            pid = start(fleet, number)
            self.servers += [pid] if number == shard else []
            return pid

        ServerPool.start = remember  # type: ignore[method-assign]

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.left -= 1
        if self.left == 0:
            assert self.servers
            for pid in self.servers:
                # A lease that ended on a busy machine has replaced one before.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self.samples[index]


def load(config: DataConfig, seed: int) -> Source:
    train: Any = images(config.samples, seed)
    path = Path(config.path, f"fate.{os.environ['RANK']}")
    if path.exists():
        fate = json.loads(path.read_text())
        path.rename(path.with_name(f"met.{os.environ['RANK']}"))
        if "shard" in fate:
            train = Fatal(train, **fate)
        else:
            sys.setprofile(Calls(**fate).watch)
    return Source(train, images(VALIDATION_SAMPLES, seed + 1), "classification", CLASSES, (1, 8, 8))


data = {"mortal": load}
