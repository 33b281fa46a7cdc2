"""Futures whose value is a list of tensors for C++ code too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def needs_type(results: Sequence[Tensor]) -> bool:
    """Return True if C++ code may look at the future's value: the hook of DDP that sends float16.

    A future with a type takes ten times as long, so other tensors get none.
    """
    return bool(results) and results[0].dtype is torch.float16


def completed(tensors: Sequence[Tensor]) -> torch.futures.Future[Any]:
    """Return a future that is complete, with `tensors` as its value.

    Why: a future that Python completes holds an object of Python, and the FP16_COMPRESS hook that
    is built into DistributedDataParallel asserts a list of tensors. Without: that hook would fail.
    Checked: 2.11, 2.13, 2.15.
    """
    values = list(tensors)
    future: torch.futures.Future[Any] = torch._C.fork(lambda: values)  # type: ignore[assignment]
    return future


def completed_after(
    done: torch.futures.Future[Any], tensors: Sequence[Tensor]
) -> torch.futures.Future[Any]:
    """Return a future that completes after `done`, with `tensors` as its value or the same error.

    Why and without: as `completed`; only TorchScript makes such a future before the value is there.
    Checked: 2.11, 2.13, 2.15.
    """
    future: torch.futures.Future[Any] = _continuation()(done, list(tensors))
    return future


@cache
def _continuation() -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        unit = torch.jit.CompilationUnit(
            """
def after(done: Future[Tensor], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def start(done: Future[Tensor], tensors: List[Tensor]):
    return torch.jit.fork(after, done, tensors)
"""
        )
    start: Callable[..., Any] = unit.start
    return start
