"""never_ending_program.py FOLDER [MODULE...]: two ranks with data-loader workers that never end.

The fork server imports each MODULE before it starts them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shoal.launch.restarting import RestartingRun, Work


def run(folder: str) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    path = Path(folder, os.environ["RANK"])
    for _ in DataLoader(TensorDataset(torch.zeros(1000)), num_workers=1):
        path.with_suffix(".partial").write_text(f"{os.getpid()} {sys.stdout.isatty()}")
        path.with_suffix(".partial").rename(path.with_suffix(".ready"))
        time.sleep(1000)


if __name__ == "__main__":
    work = Work("never_ending_program:run", sys.argv[1:2], preload=sys.argv[2:], torch_store=True)
    sys.exit(RestartingRun(work, 2).run())
