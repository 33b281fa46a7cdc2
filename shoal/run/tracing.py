"""A trace of some steps of a run: when it begins and ends, what it notes, and how it becomes one
file.

      steps    1 ... 10 │ 11   12   13 │ 14 ...                `3@10`
                        on             off: clocks are compared, rank 0 gets all spans and writes trace.json

Before and after these steps nothing is noted and nobody is asked. Collectives are seen where all of
them pass: in the groups of Shoal's own backend. What DistributedDataParallel waits for at the end
of a backward pass no handle tells: it is what remains of that pass after the last gradient, as long
as something is under way."""

from __future__ import annotations

import atexit
import json
import socket
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shoal.comm.clocks import ClockOffset, clock_id, offsets
from shoal.comm.mesh import Mesh
from shoal.config.trace_window import Window
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.c10d import process_groups
from shoal.shm_backend.group import ShoalGroup
from shoal.strategies.base import (
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
    forward_backward,
)
from shoal.trace import chrome
from shoal.trace.chrome import Trace
from shoal.trace.span import ASIDE, BACKWARD, BLOCKED, FORWARD, OPTIMIZER, STEP, Span


class Tracing:
    """Traces a window of a run's steps. Every rank makes one.

    Args:
        directory: where rank 0 puts the trace.
    """

    def __init__(self, window: Window, directory: Path, mesh: Mesh) -> None:
        self.window, self.directory, self.mesh, self.recorder = (
            window,
            directory,
            mesh,
            mesh.recorder,
        )
        self._taken = self._step_ns = self._optimizer_ns = 0
        self._over = False
        self._part: LocalModel | None = None
        self._hooks: list[Any] = []
        self._groups: list[ShoalGroup] = []
        _refuse(mesh)

    def wrap_step(self, part: LocalModel, optimizer: Optimizer) -> None:
        """Follow these steps; call it when nothing else has to be hooked to them."""
        self._part = part
        optimizer.register_step_pre_hook(lambda *_: self._pre_optimizer_step())
        optimizer.register_step_post_hook(lambda *_: self._after())
        atexit.register(self._warn_not_traced)
        if self.window.after == 0:
            self.watch()

    def watch_passes(self, part: LocalModel, batch: LocalBatch) -> StepResult:
        """`both_passes`, noted."""
        # Those of a pipeline are noted where they are made: each is of one micro-batch and stage.
        if not self.recorder.on or part.pass_traits.recorded:
            return forward_backward(part, batch)
        recorder, ends = self.recorder, [0]

        def forward(micro: LocalBatch) -> ForwardOutput:
            begun_ns = recorder.now()
            if ends[-1]:  # the micro-batch before
                recorder.note(BACKWARD, "backward", ends[-1], begun_ns)
            outcome = part.forward(micro)
            ends.append(recorder.now())
            recorder.note(FORWARD, "forward", begun_ns, ends[-1])
            return outcome

        loss = part.run(forward, batch)
        part.reduce_gradients()
        now = recorder.now()
        recorder.note(BACKWARD, "backward", ends[-1], now)
        recorder.note(BLOCKED, "last gradients", max(recorder.touched_ns, ends[-1]), now)
        return loss

    def aside(self, doing: str) -> AbstractContextManager[None]:
        """What happens inside belongs to no step."""
        return self.recorder.during(ASIDE, doing)

    def finish(self) -> None:
        """The run ends here: write what whole steps there are. Collective, unless it was
        written.
        """
        if self.recorder.on and self._taken > self.window.after:
            self._end()
        elif self.recorder.on:
            self.unwatch()
        self._warn_not_traced()

    def _pre_optimizer_step(self) -> None:
        self._optimizer_ns = self.recorder.now() if self.recorder.on else 0

    def _after(self) -> None:
        self._taken += 1
        if self.recorder.on:
            now = self.recorder.now()
            self.recorder.note(OPTIMIZER, "optimizer", self._optimizer_ns, now)
            self.recorder.note(STEP, f"step {self._taken}", self._step_ns, now)
            self._step_ns = now
        if self._taken == self.window.after:
            self.watch()
        elif self._taken == self.window.after + self.window.steps:
            self._end()

    def watch(self) -> None:
        """Follow all groups and gradients from now on."""
        assert self._part is not None
        known = process_groups() if dist.is_initialized() else []
        self._groups = [group for group in known if isinstance(group, ShoalGroup)]
        for group in self._groups:
            group.recorder = self.recorder
        touch = self.recorder.mark_active
        for parameter in self._part.trainable_params.values():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _: touch()))
        self.recorder.begin()
        self._step_ns = self.recorder.now()

    def unwatch(self) -> list[Span]:
        """Forget them. Returns what whole steps left."""
        spans = [span for span in self.recorder.end() if span.start_ns < self._step_ns]
        for group in self._groups:
            group.recorder = None
        for hook in self._hooks:
            hook.remove()
        self._groups, self._hooks = [], []
        return spans

    def _end(self) -> None:
        """Make one file of all ranks' spans. Collective."""
        spans, self._over = self.unwatch(), True
        atexit.unregister(self._warn_not_traced)
        host = socket.gethostname()
        ahead = offsets(self.mesh, clock_id(host), self.recorder.now)
        hosts = self.mesh.all_gather_str(host)
        found = collected(self.mesh, spans)
        if self.mesh.rank == 0:
            first = self.window.after + 1
            steps = range(first, self._taken + 1)
            self._write(trace_of(found, ahead, hosts, steps))

    def _write(self, trace: Trace) -> None:
        try:
            file = chrome.write(trace, self.directory)
            _say(
                f"steps {trace.steps[0]} to {trace.steps[-1]} traced: shoal trace {file}, or open "
                "it in https://ui.perfetto.dev"
            )
        except OSError as error:
            _say(f"no trace was written: {self.directory}: {error.strerror}; training goes on")

    def _warn_not_traced(self) -> None:
        """Say so where there is no trace; once."""
        atexit.unregister(self._warn_not_traced)
        if not self._over and self.mesh.rank == 0:
            cure = f" Trace earlier: --trace=1@{self._taken - 1}" if self._taken else ""
            _say(
                f"no trace was written: it was to be of {self.window.steps} steps after the first "
                f"{self.window.after}, "
                f"and the run took {self._taken}.{cure}"
            )
        self._over = True


def _refuse(mesh: Mesh) -> None:
    """Raise StrategyRefused where a trace would show less than there is, and call communication
    computing.
    """
    if mesh.device.type != "cpu":
        raise StrategyRefused(
            f"--trace: this rank computes on {mesh.device}, where a kernel runs long after its "
            "call; spans are read "
            "from the CPU's clock and would be wrong. Use torch.profiler, or hide the GPU: "
            "CUDA_VISIBLE_DEVICES= ..."
        )
    if mesh.size > 1 and not isinstance(dist.group.WORLD, ShoalGroup):
        raise StrategyRefused(
            f"--trace: the program's own process group (backend {dist.get_backend()}) hides what "
            "ranks send. Let "
            'shoal.init() make the group, or make it with init_process_group("cpu:shoal").'
        )


def trace_of(
    found: list[list[Span]], ahead: list[ClockOffset], hosts: list[str], steps: range
) -> Trace:
    """The spans of all ranks on rank 0's clock."""
    spans = {
        rank: [span.moved(-offset.ahead_ns) for span in mine]
        for rank, (mine, offset) in enumerate(zip(found, ahead, strict=True))
    }
    error_s = max(offset.error_ns for offset in ahead) * 1e-9
    return Trace(spans, dict(enumerate(hosts)), steps, error_s)


def collected(mesh: Mesh, spans: list[Span]) -> list[list[Span]]:
    """On rank 0, the spans of all ranks; on others, their own. Collective. Nothing is unpickled."""
    if mesh.rank != 0:
        data = torch.frombuffer(
            bytearray(zlib.compress(json.dumps(spans).encode(), 1)), dtype=torch.uint8
        )
        dist.send(torch.tensor([len(data)], device=mesh.device), 0)
        dist.send(data.to(mesh.device), 0)
        return [spans]
    return [spans, *(list(_received(mesh, rank)) for rank in range(1, mesh.size))]


def _received(mesh: Mesh, rank: int) -> Iterator[Span]:
    length = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    dist.recv(length, rank)
    data = torch.empty(int(length), dtype=torch.uint8, device=mesh.device)
    dist.recv(data, rank)
    for row in json.loads(zlib.decompress(bytes(data.cpu().numpy()))):
        span = Span(*row)
        yield span._replace(ranks=tuple(span.ranks))


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
