"""A trace of some steps of a run: its window, its spans, and one file from all ranks.

      steps    1 ... 10 │ 11   12   13 │ 14 ...                `3@10`
                        on             off: ranks compare clocks, rank 0 collects all spans and
                                            writes trace.json

Before and after these steps nothing is recorded. Collectives are recorded in the process groups of
Shoal's own backend, because all of them go through there. DistributedDataParallel gives no handle
for its wait at the end of a backward pass. So that wait is taken to be the rest of the pass after
the last gradient, while a collective is in flight.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from shoal.comm.axis import all_gather_bytes
from shoal.comm.clocks import offsets
from shoal.comm.mesh import Mesh
from shoal.config.trace_window import Window
from shoal.errors import StrategyRefused
from shoal.platform.processes import boot_id
from shoal.platform.torch_private.c10d import process_groups
from shoal.shm_backend.group import ShoalGroup
from shoal.strategies.base import ForwardOutput, LocalBatch, LocalModel, StepResult
from shoal.strategies.local_step import forward_backward
from shoal.trace import chrome
from shoal.trace.chrome import Trace
from shoal.trace.recorder import BACKWARD, BLOCKED, FORWARD, OPTIMIZER, STEP, Span


class Tracing:
    """Traces a window of a run's steps. Every rank makes one.

    Args: directory: rank 0 writes the trace there.

    Raises: StrategyRefused: on this device spans would be wrong, or in this process group
        communication would look like compute.
    """

    def __init__(self, window: Window, directory: Path, mesh: Mesh) -> None:
        self.window = window
        self.directory = directory
        self.mesh = mesh
        self.recorder = mesh.recorder
        self._steps = 0  # taken so far
        self._step_ns = 0  # start of this step
        self._optimizer_ns = 0  # start of this step's `optimizer.step()`
        self._ended = False
        self._local_model: LocalModel | None = None
        self._watching = ExitStack()
        if mesh.device.type != "cpu":
            raise StrategyRefused(
                f"--trace: this rank computes on {mesh.device}, where a kernel runs long after its "
                "call; spans are read from the CPU's clock and would be wrong. Use torch.profiler, "
                "or hide the GPU: CUDA_VISIBLE_DEVICES= ..."
            )
        if mesh.size > 1 and not isinstance(dist.group.WORLD, ShoalGroup):
            raise StrategyRefused(
                f"--trace: the program's own process group (backend {dist.get_backend()}) hides "
                "what ranks send. Let shoal.init() make the group, or make it with "
                'init_process_group("cpu:shoal").'
            )

    def wrap_step(self, local_model: LocalModel, optimizer: Optimizer) -> None:
        """Count and record the steps of `optimizer`.

        Call it after all other hooks were registered, so that a step's span includes their time.
        """
        self._local_model = local_model
        optimizer.register_step_pre_hook(lambda *_: self._pre_optimizer_step())
        optimizer.register_step_post_hook(lambda *_: self._post_optimizer_step())
        atexit.register(self._warn_not_traced)
        if self.window.after == 0:
            self.watch()

    def run_passes(self, local_model: LocalModel, batch: LocalBatch) -> StepResult:
        """Call `forward_backward` of a local model, and record its passes. Collective."""
        # A pipeline records its passes itself, with their stage and micro-batch.
        if not self.recorder.on or local_model.is_partial:
            return forward_backward(local_model, batch)
        recorder = self.recorder
        forward_end_ns = 0

        def forward(micro_batch: LocalBatch) -> ForwardOutput:
            nonlocal forward_end_ns
            start_ns = recorder.now()
            if forward_end_ns:  # the backward pass of the micro-batch before this one ends here
                recorder.note(BACKWARD, "backward", forward_end_ns, start_ns)
            output = local_model.forward(micro_batch)
            forward_end_ns = recorder.now()
            recorder.note(FORWARD, "forward", start_ns, forward_end_ns)
            return output

        result = local_model.run(forward, batch)
        local_model.reduce_gradients()
        now = recorder.now()
        recorder.note(BACKWARD, "backward", forward_end_ns, now)
        last_gradient_ns = max(recorder.touched_ns, forward_end_ns)
        recorder.note(BLOCKED, "last gradients", last_gradient_ns, now)
        return result

    def finish(self) -> None:
        """End the trace with the run, and write the complete steps. Collective.

        It does nothing if the window has ended before.
        """
        if self.recorder.on and self._steps > self.window.after:
            self._end()
        elif self.recorder.on:
            self.unwatch()
        self._warn_not_traced()

    def _pre_optimizer_step(self) -> None:
        self._optimizer_ns = self.recorder.now() if self.recorder.on else 0

    def _post_optimizer_step(self) -> None:
        self._steps += 1
        if self.recorder.on:
            now = self.recorder.now()
            self.recorder.note(OPTIMIZER, "optimizer", self._optimizer_ns, now)
            self.recorder.note(STEP, f"step {self._steps}", self._step_ns, now)
            self._step_ns = now
        if self._steps == self.window.after:
            self.watch()
        elif self._steps == self.window.after + self.window.steps:
            self._end()

    def watch(self) -> None:
        """Record collectives of all process groups, and the arrival of gradients, from now on."""
        assert self._local_model is not None
        for group in process_groups() if dist.is_initialized() else ():
            if isinstance(group, ShoalGroup):
                group.recorder = self.recorder
                self._watching.callback(setattr, group, "recorder", None)
        mark_active = self.recorder.mark_active
        for parameter in self._local_model.trainable_params.values():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda _: mark_active())
                self._watching.callback(hook.remove)
        self.recorder.begin()
        self._step_ns = self.recorder.now()

    def unwatch(self) -> list[Span]:
        """Stop recording. Return the spans that began in complete steps."""
        spans = [span for span in self.recorder.end() if span.start_ns < self._step_ns]
        self._watching.close()
        return spans

    def _end(self) -> None:
        """Make one file of all ranks' spans. Collective."""
        spans = self.unwatch()
        self._ended = True
        atexit.unregister(self._warn_not_traced)
        host = socket.gethostname()
        clock_offsets = offsets(self.mesh, boot_id() or host, self.recorder.now)
        hosts = self.mesh.all_gather_str(host)
        spans_of_ranks = _gather_spans(self.mesh, spans)
        if self.mesh.rank != 0:
            return
        in_time_of_first = {
            rank: [span.moved(-offset.ahead_ns) for span in spans_of_ranks[rank]]
            for rank, offset in enumerate(clock_offsets)
        }
        steps = range(self.window.after + 1, self._steps + 1)
        error_s = max(offset.error_ns for offset in clock_offsets) * 1e-9
        trace = Trace(in_time_of_first, dict(enumerate(hosts)), steps, error_s)
        try:
            file = chrome.write(trace, self.directory)
            _warn(
                f"steps {trace.steps[0]} to {trace.steps[-1]} traced: shoal trace {file}, or open "
                "it in https://ui.perfetto.dev"
            )
        except OSError as error:
            _warn(f"no trace was written: {self.directory}: {error.strerror}; training goes on")

    def _warn_not_traced(self) -> None:
        """Warn once if the run ended before its window did."""
        atexit.unregister(self._warn_not_traced)
        if not self._ended and self.mesh.rank == 0:
            cure = f" Trace earlier: --trace=1@{self._steps - 1}" if self._steps else ""
            _warn(
                f"no trace was written: it was to be of {self.window.steps} steps after the first "
                f"{self.window.after}, and the run took {self._steps}.{cure}"
            )
        self._ended = True


def _gather_spans(mesh: Mesh, spans: list[Span]) -> list[list[Span]]:
    """Return the spans of all ranks on rank 0, and the rank's own on the others. Collective.

    They travel as compressed JSON: nothing is unpickled.
    """
    if mesh.size == 1:
        return [spans]
    own = zlib.compress(json.dumps(spans).encode(), 1)
    messages = all_gather_bytes(own, mesh.size, mesh.device, mesh.group)
    if mesh.rank != 0:
        return [spans]
    return [[*map(_span, json.loads(zlib.decompress(message)))] for message in messages]


def _span(row: list[Any]) -> Span:
    span = Span(*row)
    return span._replace(ranks=tuple(span.ranks))


def _warn(text: str) -> None:
    # Not through `announce`: that is for the start of a run, and a script may print it anywhere.
    print(f"note: {text}", file=sys.stderr, flush=True)
