"""Shoal: train one PyTorch model on many devices, by any strategy, with the numbers of one device.

run = shoal.init()
model, optimizer, loader = run.prepare(model, optimizer, loader)
loss = run.forward_backward(compute_loss, x, y)  # compute_loss(x, y) calls the model
run.save("model.safetensors")
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shoal.shm_backend.registration import register

if TYPE_CHECKING:
    from shoal.checkpoint import Checkpoints
    from shoal.comm.arrays import (
        all_gather,
        all_reduce,
        allgather,
        allreduce,
        barrier,
        broadcast,
    )
    from shoal.data.batch_fetcher import Collate
    from shoal.data.source import Source
    from shoal.errors import ShoalError
    from shoal.planner.library import plan
    from shoal.run import Run, init
    from shoal.strategies.base import Strategy
    from shoal.strategies.loss_terms import counted, summed
    from shoal.verification import Verdict, verify
    from shoal.verification.script.script_verdict import verify_script
    from shoal.weights import empty_weights, load_weights

__version__ = "0.1.0"
__all__ = [
    "Checkpoints",
    "Collate",
    "Run",
    "ShoalError",
    "Source",
    "Strategy",
    "Verdict",
    "all_gather",
    "all_reduce",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "counted",
    "empty_weights",
    "init",
    "load_weights",
    "plan",
    "summed",
    "verify",
    "verify_script",
]

_HOMES = {
    "init": "shoal.run",
    "Run": "shoal.run",
    "counted": "shoal.strategies.loss_terms",
    "summed": "shoal.strategies.loss_terms",
    "plan": "shoal.planner.library",
    "verify": "shoal.verification",
    "Verdict": "shoal.verification",
    "verify_script": "shoal.verification.script.script_verdict",
    "Checkpoints": "shoal.checkpoint",
    "ShoalError": "shoal.errors",
    "all_reduce": "shoal.comm.arrays",
    "all_gather": "shoal.comm.arrays",
    "allreduce": "shoal.comm.arrays",
    "allgather": "shoal.comm.arrays",
    "broadcast": "shoal.comm.arrays",
    "barrier": "shoal.comm.arrays",
    "Collate": "shoal.data.batch_fetcher",
    "Source": "shoal.data.source",
    "Strategy": "shoal.strategies.base",
    "empty_weights": "shoal.weights",
    "load_weights": "shoal.weights",
}


if sys.platform == "win32":
    _sentence = "Shoal does not run on Windows itself. Use WSL, and install it there"
    if sys.argv[0].endswith("shoal.exe") or sys.orig_argv[1:3] == ["-m", "shoal"]:
        sys.exit(f"shoal: {_sentence}")
    raise ImportError(_sentence)
register()  # the backend "shoal" of torch.distributed


def __getattr__(name: str) -> Any:
    # Loaded at first use: `shoal --help` imports this package too, and must not wait for torch.
    from importlib import import_module

    if name == "optim":
        return import_module("shoal.optim")
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
