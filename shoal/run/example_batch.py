"""The example that is made of the first batch, for strategies that trace or measure the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.data.tree_map import tensors_in
from shoal.data.tree_map import tree_map as map_items
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.tensor_state import version
from shoal.strategies import base
from shoal.strategies.local_step import samples_of
from shoal.trial.untouched import leaving_no_trace

MAX_EXAMPLES = 8
"""Samples of the example batch, with which models are traced and measured."""


def example_of(
    batch: base.LocalBatch,
    models: Sequence[nn.Module],
    mesh: Mesh,
    accumulate: int,
    full_batch_rows: int = 0,
) -> base.ExampleBatch:
    """Return a few samples of a batch, and the models that `compute_loss` calls on them.

    The models, the script and the random numbers are left as they were.

    Args: full_batch_rows: samples of a full global batch, where `batch` may be a shorter one.
    """
    window = slice(0, min(max(batch.num_samples, 1), MAX_EXAMPLES))
    args, kwargs = map(_copied, samples_of(batch, window))
    called: set[nn.Module] = set()
    with (
        leaving_no_trace(models, batch.step.compute_loss, ()),
        _noted_calls(models, called),
        torch.enable_grad(),  # compute_loss may take gradients itself
    ):
        batch.step.compute_loss(*args, **kwargs)
    if mesh.pipeline.size > 1 and any(map(version, tensors_in((args, kwargs)))):
        raise StrategyRefused(
            "pipeline: compute_loss writes into its batch, and it runs once for each stage on the "
            "same samples. Write into a copy: x = x.clone()."
        )
    # Rounded up: the largest micro-batch that any rank computes.
    share = batch.num_samples
    if batch.step.sizes_known:
        share = -(-max(batch.step.global_batch_size, full_batch_rows) // mesh.data.size)
    num_samples = -(-share // accumulate)
    return base.ExampleBatch(batch.step.compute_loss, args, kwargs, num_samples, called)


@contextmanager
def _noted_calls(models: Sequence[nn.Module], called: set[nn.Module]) -> Iterator[None]:
    """Add the models that are called to `called`; a call inside of another one does not count."""
    depth = 0

    def before(module: nn.Module, _args: Any) -> None:
        nonlocal depth
        if depth == 0:
            called.add(module)
        depth += 1

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(before).remove)
            hooks.callback(model.register_forward_hook(after, always_call=True).remove)
        yield


def _copied(batch: Any) -> Any:
    """Return a nest with tensors of its own: the function may write into its batch."""
    return batch.clone() if isinstance(batch, Tensor) else map_items(batch, _copied)
