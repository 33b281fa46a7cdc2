"""A data set on which a rank falls asleep in a forward pass, once: `--plugin sleeping_data.py`.

`data.path` is a directory. The file `sleeps.RANK` in it holds the number of steps after which that
rank sleeps. The rank takes the file away, so that it sleeps once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tiny_data import CLASSES, VALIDATION_SAMPLES, images
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.config.job import DataConfig
from shoal.data.source import Source


def load(config: DataConfig, seed: int) -> Source:
    train: Any = images(config.samples, seed)
    path = Path(config.path, f"sleeps.{os.environ['RANK']}")
    if path.exists():
        last = int(path.read_text())
        path.rename(path.with_name(f"slept.{os.environ['RANK']}"))
        made: list[object] = []

        def sleeps_in_its_step(module: nn.Module, *_: object) -> None:
            if module.training and len(made) == last:
                time.sleep(1000)

        register_optimizer_step_post_hook(lambda *_: made.append(None))
        register_module_forward_pre_hook(sleeps_in_its_step)
    return Source(train, images(VALIDATION_SAMPLES, seed + 1), "classification", CLASSES, (1, 8, 8))


data = {"sleepy": load}
