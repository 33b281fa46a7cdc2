"""Records the training steps of a script inside of its process, without a change of the script.

the script            what is watched                                 what is recorded
model(x)              global hooks of torch.nn.Module                 outputs, their gradients
loss.backward()       torch.autograd.backward                         losses
run.forward_backward  shoal.Run                                       global mean losses
optimizer.step()      global hooks of torch.optim.Optimizer           gradients, weights after
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from shoal.data.tree_map import tensors_in
from shoal.errors import StrategyRefused, UsageError
from shoal.launch.rank import run_file
from shoal.run import Run
from shoal.run.loop_watch import LoopWatch
from shoal.run.optimizer_binding import group_settings, params_of
from shoal.run.preparation import Draws
from shoal.run.step import TrainingStep
from shoal.verification.script import printed_figures
from shoal.verification.script.full_values import ShoalValues, digests, whole
from shoal.verification.script.loader_batches import BatchTape, JoinedBatches
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.module_calls import DrawWatch, ModuleCalls, user_line
from shoal.verification.script.run_record import RankRecord, RecordWriter, StepRecord, read_run
from shoal.verification.script.same_start import Float64Everywhere, SameStart, turn_dropout_off
from shoal.verification.script.watched_calls import watch
from shoal.verification.script.written_files import WrittenFiles
from shoal.verification.trajectory import hide_gpu


class EnoughSteps(BaseException):
    """Ends the script where it begins a step more than are recorded, so that it may save first.
    No `except Exception` of it catches this.
    """


class ScriptRecorder:
    """Records every step of the script that runs in this process.

    Args:
        writer: of the record.
        record: the index of this rank, to be completed.
        steps: the script ends where it begins one more.
        start: gives one process the weights and rates of many; None on many.
    """

    def __init__(
        self,
        writer: RecordWriter,
        record: RankRecord,
        steps: int,
        start: SameStart | None = None,
    ) -> None:
        self.record = record
        self.names = ModelNames()
        self._writer = writer
        self._steps = steps
        self._start = start
        self.draws = DrawWatch()
        self._calls = ModuleCalls(self.names, self._before_model, self.draws)
        self._run: ShoalValues | None = None
        self._step = StepRecord(1)
        self._tensors: dict[str, Tensor] = {}
        self._stepping = 0
        self._preparing = False
        self._watching = ExitStack()
        self._started = False

    def start(self) -> None:
        """Begin to record."""
        self._calls.start(self._watching)
        for hook in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._watching.callback(hook.remove)
        for owner, name, answer in (
            (torch.autograd, "backward", self._backward),
            (Run, "forward_backward", self._forward_backward),
            (Run, "backward", self._loop_backward),
            (LoopWatch, "begin", self._fetch),
            (DataLoader, "__iter__", self._iterate),
            (Run, "prepare", self._prepare),
            (TrainingStep, "forward_backward", self._passes),
        ):
            watch(self._watching, owner, name, answer)

    def stop(self) -> None:
        """End to record, and write the index."""
        self._watching.close()
        self._writer.index(self.record)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            line = user_line()
            if line:
                self._step.lines.setdefault("backward", line)
            losses = [t.detach() for t in tensors_in(tensors) if t.numel() == 1]
            self._step.draws_in_loss |= self.draws.drew()
            if losses:  # else the first stages of a pipeline go back from what they have sent
                self._step.losses.append(float(sum(loss.double().sum() for loss in losses)))
        return original(tensors, *args, **kwargs)

    def _prepare(self, original: Any, run: Run, *things: Any) -> Any:
        self._preparing = True  # prepare may try the optimizer on a small model of its own
        try:
            prepared = original(run, *things)
        finally:
            self._preparing = False
        if self._run is None:
            self.record.by_shoal = True
        run._loop.refuses_global_draws = False
        self._run = ShoalValues(run)
        self.record.axes = self._run.axes()
        if self._run.root is not None:
            self.names.use(self._run.root)
        return prepared

    def _fetch(self, original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self.draws.fetched()

    def _iterate(self, original: Any, loader: DataLoader) -> Iterator[Any]:
        return self._told_of_batches(iter(original(loader)))

    def _told_of_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.draws.fetched()
            yield batch

    def _loop_backward(self, original: Any, run: Run, *args: Any, **kwargs: Any) -> Any:
        self._step.draws_in_loss |= self.draws.drew()
        return self._passes_of(original, run, *args, **kwargs)

    def _forward_backward(self, original: Any, run: Run, *args: Any, **kwargs: Any) -> Any:
        with self.draws.paused():  # Shoal draws the numbers of one device
            return self._passes_of(original, run, *args, **kwargs)

    def _passes_of(self, original: Any, run: Run, *args: Any, **kwargs: Any) -> Any:
        self._end_after_the_last_step()
        self._step.lines.setdefault("backward", user_line())
        self._before_model(None, ())
        self._calls.is_paused = True  # a pipeline is divided, rows to gather are looked for
        try:
            result = original(run, *args, **kwargs)
        finally:
            self._calls.is_paused = False
        loss = result[0] if isinstance(result, tuple) else result
        self._step.losses.append(float(loss))
        return result

    def _passes(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._calls.is_paused = False
        return original(*args, **kwargs)

    def _end_after_the_last_step(self) -> None:
        if self._step.number > self._steps:
            raise EnoughSteps

    def _before_model(self, module: nn.Module | None, args: Any) -> None:
        if torch.is_grad_enabled():
            self._end_after_the_last_step()
        known = any(name.startswith("input/") for name in self._step.digests)
        if self._run is None and not known and torch.is_grad_enabled():
            inputs = {str(index): tensor for index, tensor in enumerate(tensors_in(args))}
            self._step.digests |= digests(inputs, "input")
        if module is not None and self.names.find(module) is None:
            return  # no model: a loss function, or a layer without parameters
        if self._started:
            return
        self._started = True
        if self._run is not None:
            return
        # The models get the weights of many ranks, or those that they begin with are recorded.
        self.record.has_group = dist.is_initialized()
        if self._start is not None:
            self._start.load(self.names)
        weights = self._weights()
        self._step.digests |= digests(weights, "start")
        if self.record.rank == 0:
            self._writer.write("start", weights)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Return False for an optimizer of another thread, such as a parameter server's."""
        if self._preparing or threading.current_thread() is not threading.main_thread():
            return False
        return self._run is None or any(o is optimizer for o in self._run.prepared.optimizers)

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._stepping += 1
        if self._stepping > 1:  # a step inside of another optimizer's
            return
        self._end_after_the_last_step()
        step = self._step
        step.lines.setdefault("step", user_line())
        if self._start is not None:
            self._start.set_rates(step.number, optimizer)
        step.settings = group_settings(optimizer)
        gradients = self._gradients(optimizer)
        step.gradients = {name: g is not None for name, g in gradients.items()}
        found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        step.digests |= digests(found, "gradient")
        self._tensors |= {f"gradient/{name}": gradient for name, gradient in found.items()}

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._stepping -= 1
        if self._stepping:
            return
        step = self._step
        step.collectives = self._calls.collectives
        self.draws.stepped()
        step.calls, tensors = self._calls.take()
        weights = self._weights()
        step.digests |= digests(weights, "weight")
        if self.record.rank == 0:
            tensors |= self._tensors
            tensors |= {f"weight/{name}": weight for name, weight in weights.items()}
        tensors |= {f"buffer/{name}": buffer for name, buffer in self._buffers().items()}
        if self._run is not None:
            self.record.is_synchronous = self._run.run.is_synchronous
            self.record.draws_of_loop = self._run.prepared.watch.drawn
        self._writer.write(f"step-{step.number}", tensors)
        self.record.steps.append(step)
        self._tensors, self._step = {}, StepRecord(step.number + 1)

    def _gradients(self, optimizer: Optimizer) -> dict[str, Tensor | None]:
        if self._run is not None:
            return self._run.gradients()
        owned = {id(parameter) for parameter in params_of(optimizer)}
        named: list[tuple[str, Tensor]] = [
            (name, parameter)
            for name, parameter in self.names.parameters()
            if id(parameter) in owned and parameter.requires_grad
        ]
        unnamed = owned - {id(parameter) for _, parameter in named}
        others = [p for p in params_of(optimizer) if id(p) in unnamed and p.requires_grad]
        named += [(f"parameter {index} of no model", p) for index, p in enumerate(others)]
        return {name: None if p.grad is None else whole(p.grad) for name, p in named}

    def _weights(self) -> dict[str, Tensor]:
        if self._run is not None:
            return self._run.weights()
        return {name: whole(parameter) for name, parameter in self.names.parameters()}

    def _buffers(self) -> dict[str, Tensor]:
        if self._run is not None:
            return self._run.buffers()
        return {name: whole(buffer) for name, buffer in self.names.buffers()}


@dataclass(frozen=True)
class RecordingPlan:
    """All that a process needs to know to record its part of a run.

    Attributes:
        script, arguments: the file, and its words on the command line.
        folder: of the record.
        steps: of optimizers; the script ends where it begins one more.
        like: the record of the run on many ranks, whose batches and weights this one process
            gets; None for that run itself.
        draws: as for `shoal.init`; with "rank" dropout is off under Shoal too.
    """

    script: str
    arguments: tuple[str, ...]
    folder: str
    steps: int
    draws: Draws
    like: str | None = None


def record_script(plan: RecordingPlan) -> None:
    """Run a script as `python script` would, and write the record of this rank."""
    hide_gpu()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    record = RankRecord(rank, world)
    writer = RecordWriter(Path(plan.folder), rank)
    with ExitStack() as stack:
        stack.enter_context(Float64Everywhere())
        WrittenFiles(writer.folder / "files").start(stack)
        start = None
        if plan.like is None:
            BatchTape(writer, record).start(stack)
        else:  # loaders yield what the ranks have recorded
            like, ranks = Path(plan.like), read_run(Path(plan.like))
            JoinedBatches(like, ranks).start(stack)
            start = SameStart(like, ranks, record)
        recorder = ScriptRecorder(writer, record, plan.steps, start)
        turn_dropout_off(stack, record, lambda: recorder.draws.is_paused and plan.draws == "global")
        file = writer.folder / printed_figures.FILE
        printed = stack.enter_context(open(file, "w", encoding="utf-8", errors="replace"))
        stack.enter_context(redirect_stdout(printed))
        recorder.start()
        stack.callback(recorder.stop)
        try:
            run_file(plan.script, [*plan.arguments])
        except EnoughSteps:
            pass
        except (StrategyRefused, UsageError) as refusal:
            record.refusal = str(refusal)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
