"""How a run begins: this process's place in the world, the same seed everywhere, the strategies
in their order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from shoal.comm.mesh import init_mesh
from shoal.comm.parallel_dims import ParallelDims
from shoal.config.trace_window import parse_window as parse_window
from shoal.errors import ConfigError
from shoal.launch.environment import read
from shoal.run.optimizer_in_backward import refuse_with
from shoal.run.run import Run, RunSettings
from shoal.run.tracing import Tracing
from shoal.strategies import base, build_strategies, parse_line
from shoal.strategies.options import mesh_sizes
from shoal.strategies.transforms.accumulate import Accumulate
from shoal.strategies.transforms.compile import Compile
from shoal.strategies.transforms.precision import LossScale, Precision

PrecisionName = Literal["fp64", "fp32", "bf16", "fp16"]


def init(
    strategy: str = "ddp",
    *,
    seed: int = 0,
    accumulate: int = 1,
    precision: PrecisionName = "fp32",
    compile: bool = False,
    step_in_backward: bool = False,
    trace: str | None = None,
    trace_to: str | Path = ".",
    announce: Callable[[str], None] = print,
) -> Run:
    """Take this process's place in the world that the launcher made. Collective: every rank calls
    it first.

    Under `shoal launch`, torchrun, srun or mpirun the place is read from their variables; a plain
    `python script.py` is a world of one. Sets the current CUDA device where there are GPUs, and
    seeds torch, Python and NumPy alike on every rank, so that every rank builds the same model.

    Args: strategy: how several ranks train one model, e.g. "ddp"; `shoal launch --strategy`
        overrides it. seed: from which the order of samples, augmentation and dropout follow.
        accumulate: parts that each rank's share of a batch is computed in, to save memory.
        precision: "bf16" and "fp16" run the forward pass under autocast. compile: compile the model
        with torch.compile. step_in_backward: step each parameter inside the backward pass, as soon
        as its gradient is known, and free the
            gradient. The loop stays as it is; its `optimizer.step()` has nothing left to do.
        trace: steps to trace, as "3@20": three, after the first twenty. `shoal launch --trace`
        overrides it.
        trace_to: directory for trace.json, which `shoal trace` reads and https://ui.perfetto.dev
        opens.
        announce: is given what there is to say before the first step; called on rank 0 only.

    Raises: EnvironmentConflict: the launcher's variables contradict each other. ConfigError: no
        such strategy, or step_in_backward with accumulate or fp16, or no such steps to trace.
    """
    return init_with_place(
        os.environ.get("SHOAL_STRATEGY", strategy),
        seed=seed,
        accumulate=int(os.environ.get("SHOAL_ACCUMULATE", accumulate)),
        precision=precision,
        compile=compile,
        step_in_backward=step_in_backward,
        trace=os.environ.get("SHOAL_TRACE", trace),
        trace_to=os.environ.get("SHOAL_TRACE_TO", trace_to),
        announce=announce,
    )


def init_with_place(
    strategy: str,
    *,
    seed: int = 0,
    accumulate: int = 1,
    precision: PrecisionName = "fp32",
    compile: bool = False,
    step_in_backward: bool = False,
    trace: str | None = None,
    trace_to: str | Path = ".",
    announce: Callable[[str], None] = print,
) -> Run:
    """`init` for a job that has all its settings from elsewhere: nothing is overridden.
    Collective.
    """
    if accumulate < 1:
        raise ConfigError([f"accumulate: {accumulate} must be greater than 0"])
    if step_in_backward:
        refuse_with(accumulate, loss_scale=precision == "fp16")
    window = None if trace is None else parse_window(trace, "trace")
    chosen = build_strategies(parse_line(strategy))
    helpers = any(one.needs_helper_processes for one in chosen)
    mesh = init_mesh(read(os.environ), helpers, ParallelDims(**mesh_sizes(chosen)))
    _seed_generators(seed)
    scale = LossScale() if precision == "fp16" else None
    transforms: list[base.Strategy] = [
        Precision(precision, scale),
        *([Compile()] if compile else []),
    ]
    strategies = _in_order(chosen, transforms, Accumulate(accumulate))
    tracing = None if window is None else Tracing(window, Path(trace_to), mesh)
    say = announce if mesh.rank == 0 else _discard
    return Run(
        mesh, strategies, RunSettings(seed, accumulate, step_in_backward), scale, say, tracing
    )


def _seed_generators(seed: int) -> None:
    """Seed torch, Python and NumPy alike on every rank."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _in_order(
    chosen: list[base.Strategy], transforms: list[base.Strategy], accumulate: base.Strategy
) -> list[base.Strategy]:
    """The order in which strategies apply: what slices the model comes first.

    So precision is around the forward pass of a slice, and accumulation around all passes.
    """
    slicing = [strategy for strategy in chosen if strategy.needs_example_batch]
    others = [strategy for strategy in chosen if not strategy.needs_example_batch]
    return [*slicing, *transforms, *others, accumulate]


def _discard(_: str) -> None:
    """What ranks other than 0 have to say."""
