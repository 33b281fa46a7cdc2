"""Measure the memory of `shoal export` and of `model.weights`, each in a fresh process. `measure`
calls this module.

    shoal train (2 ranks, 1 step) ─> train.weight_export.export ─> train.build.load_weights

The peak is VmHWM of /proc/self/status, less what the process held before the call.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from shoal.train.build import build, load_weights
from shoal.train.run_directory import job_of
from shoal.train.weight_export import export

STRATEGIES = ("ddp", "zero3")
WIDTH = 4096  # a layer of 64 MiB
EVERY_S = 0.0005


def measured(folder: Path) -> dict[str, dict[str, int]]:
    """Bytes, by strategy that has trained the run."""
    return {strategy: _of_run(folder / strategy, strategy) for strategy in STRATEGIES}


def _of_run(run: Path, strategy: str) -> dict[str, int]:
    setting = {
        "out": run,
        "strategy": strategy,
        "model.name": "mlp",
        "model.options.hidden": [WIDTH] * 4,
        "train.max_steps": 1,
        "log.tensorboard": "false",
    }
    words = [str(word) for name, value in setting.items() for word in (f"--{name}", value)]
    _python("shoal", "train", "digits", "-n", "2", *words)
    file = run / "model.safetensors"
    found: dict[str, int] = {}
    for what in ("export", "load"):
        found |= json.loads(_python("benchmarks.checkpoint.memory", what, str(run), str(file)))
    return found


def _python(*words: str) -> str:
    """Return the text that a fresh process prints."""
    return subprocess.run(
        [sys.executable, "-m", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _export(run: Path, file: Path) -> dict[str, int]:
    with _watched() as peaks:
        export(run, file)
    return {"export": peaks["resident"]}


def _load(run: Path, file: Path) -> dict[str, int]:
    model = build(job_of(run), torch.device("cpu")).model
    sizes = [tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()]
    with _watched() as peaks:
        load_weights(model, str(file))
    return {
        "load": peaks["resident"],
        "load, private": peaks["private"],
        "largest tensor": max(sizes),
        "model": sum(sizes),
    }


@contextmanager
def _watched() -> Iterator[dict[str, int]]:
    """How far memory rises above what is held now: `resident`, known to the kernel, and `private`,
    looked at every half
    millisecond: without the pages of mapped files, which the kernel can take back."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew
    peaks: dict[str, int] = {}
    before, private, ended = _status(), [_status()["RssAnon"]], threading.Event()

    def look() -> None:
        while not ended.wait(EVERY_S):
            private.append(_status()["RssAnon"])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield peaks
    finally:
        ended.set()
        looking.join()
    peaks |= {
        "resident": _status()["VmHWM"] - before["VmRSS"],
        "private": max(private) - private[0],
    }


def _status() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes."""
    lines = [
        line.split()
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.endswith(" kB")
    ]
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in lines}


def main() -> None:
    what, run, file = sys.argv[1:]
    found: dict[str, Any] = {"export": _export, "load": _load}[what](Path(run), Path(file))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
