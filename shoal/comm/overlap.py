"""Reducing the buckets of DistributedDataParallel beside the backward pass, by any function
that blocks.
"""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's
# annotations with types.
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.platform.torch_private.c10d import GradBucket


def register_overlapped_reduce(
    ddp: DistributedDataParallel, mean: Callable[[Tensor], object], failures: list[Exception]
) -> None:
    """Let `ddp` reduce its buckets by `mean`, one after the other in a thread of its own.

    Args: mean: puts the mean over ranks in the place of a tensor. Its messages must be its own: the
        engine's collectives,
            in the other thread, must not come between.
        failures: what went wrong is added here; the caller looks after each backward pass. A future
            of torch's does not carry a Python error through the backward pass.
    """
    # One thread: buckets are ready in the same order on every rank, and collectives must start in
    # one order.
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reduce-beside")

    def hook(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        worker.submit(_reduce, bucket.buffer(), mean, done, failures)
        return done

    ddp.register_comm_hook(None, hook)


def _reduce(
    buffer: Tensor,
    mean: Callable[[Tensor], object],
    done: torch.futures.Future[Tensor],
    failures: list[Exception],
) -> None:
    try:
        mean(buffer)
    except Exception as error:  # noqa: BLE001 - whatever it is, the backward pass must not wait for ever
        failures.append(error)
    done.set_result(buffer)
