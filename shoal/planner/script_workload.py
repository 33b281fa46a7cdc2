"""A user's script as a workload: it runs to its first backward pass, with weights without memory.

    nn.Module.register_parameter     weights without memory in the place of those of the script
    run.prepare                      models and optimizers are noted, and left as they are
    run.forward_backward(f, x, y)    ends the script: f is counted as by `shoal.plan`
    run.backward, loss.backward()    ends it too: the loop itself was counted, from the model's call

A loop cannot be called again with another number of samples. So its script runs twice, the second
time with batches of twice as many rows. Nothing is stepped, and what the script saves is dropped.
Each run is a process of its own, in which the weights take no memory.
"""

from __future__ import annotations

import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.data.sharded_loader import ShardedLoader
from shoal.data.tree_map import tensors_in, tree_map
from shoal.errors import ShoalError, UsageError
from shoal.launch import preload
from shoal.launch.rank import run_file
from shoal.launch.start import start
from shoal.planner.strategy_search import Workload
from shoal.planner.trace_model import (
    NEEDS_VALUE,
    CountedStep,
    StepTracer,
    counting,
    trace_model,
    work_of_steps,
)
from shoal.platform.torch_private.fake_tensors import VALUE_NEEDED, weights_without_memory
from shoal.run import Run
from shoal.run.preparation import as_one_module, is_trained, named_models, sort_arguments
from shoal.run.prepared import NOTHING_PREPARED
from shoal.run.run_checkpoints import RunCheckpoints
from shoal.strategies.transforms.compile import Compile
from shoal.testing.world import World
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.script_recorder import EnoughSteps
from shoal.verification.script.watched_calls import watch
from shoal.verification.script.written_files import open_no_logger

T = TypeVar("T")

LIMIT_S = 600.0
VARIABLES = {"OMP_NUM_THREADS": "1", "SHOAL_STRATEGY": "single", "TORCHDYNAMO_DISABLE": "1"}
CURE = "The model alone can be planned: shoal.plan(model, optimizer, batch, compute_loss, ranks=N)."
WITHOUT_SHOAL = "the script has no shoal.init(), which a strategy needs (docs/start.md); with it:"
SEVERAL_MODELS = (
    f"the script trains several models, and its first backward pass is not all of its step. {CURE}"
)


@dataclass(frozen=True)
class FirstRun:
    """A loop that was counted once, and is to be counted again with more rows.

    Attributes: parts: micro-batches that the loop makes of a batch of its loader.
    """

    step: CountedStep
    shapes: list[tuple[int, ...]]
    parts: int


def script_workload(
    path: str, arguments: Sequence[str], first: FirstRun | None = None, ranks: int = 1
) -> Workload | FirstRun:
    """Run a script up to its first backward pass, and return its work. For a process of its own.

    Args:
        first: what the first run has returned; None for that run itself.
        ranks: of the plan. The batches of a script that divides its work by itself are those of
            one rank.

    Returns: the workload; a `FirstRun` if the script must run once more.
    Raises: UsageError: the script cannot be followed, with the reason and the cure.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    follower = _Follower(first, ranks)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        follower.start(stack)
        try:
            run_file(path, list(arguments))
        except BaseException as error:  # the script's own `finally` may have failed since
            if follower.found is None and not isinstance(error, SystemExit):
                raise _refusal(path, error) from error
    if follower.found is None:
        raise UsageError(
            f"plan: {path} ended without a backward pass. Give it arguments with which it trains: "
            f"shoal plan {path} -- ARGUMENTS"
        )
    return follower.found


def _refusal(path: str, error: BaseException) -> UsageError:
    """Return why a script cannot be followed, with the line and the cure."""
    if isinstance(error, ShoalError):
        return UsageError(f"plan: {path}: {error}")
    reason = f"fails on weights without memory with {type(error).__name__}: {error}."
    if isinstance(error, VALUE_NEEDED):
        reason = NEEDS_VALUE.format(error=error)
    return UsageError(f"plan: {path}{_line(error, path)} {reason} {CURE}")


def _line(error: BaseException, path: str) -> str:
    """Return the innermost line of the script in a traceback, as ":41"."""
    file = os.path.realpath(path)
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if os.path.realpath(frame.filename) == file]
    return f":{numbers[-1]}" if numbers else ""


class _Passed(nn.Module):
    """Stands for a model in DistributedDataParallel: the model alone, on one rank."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    no_sync = nullcontext


class _Follower:
    """Watches the script of this process.

    Attributes: found: the workload, or what the first of two runs has counted.
    """

    def __init__(self, first: FirstRun | None, ranks: int) -> None:
        self.found: Workload | FirstRun | None = None
        self._first = first
        self._ranks = ranks
        self._rows = 0 if first is None else 2 * first.step.samples
        self._parts = 1 if first is None else first.parts
        self._run: Run | None = None
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._names = ModelNames()
        self._passes = ExitStack()
        self._tracer: StepTracer | None = None
        self._depth = 0
        self._model: nn.Module = nn.Module()
        self._inputs: list[Tensor] = []
        self._batch_bytes = 0.0
        self._batch_rows = 0
        self._is_loop_loss = False

    def start(self, stack: ExitStack) -> None:
        """Begin to watch, until the end of a context."""
        stack.enter_context(weights_without_memory())
        stack.enter_context(self._passes)
        for owner, name, make in (
            (nn.Module, "__call__", self._call),
            (Optimizer, "__init__", self._make_optimizer),
            (torch.autograd, "backward", self._backward),
            (Run, "prepare", self._prepare),
            (Run, "forward_backward", self._forward_backward),
            (Run, "backward", self._backward_of_run),
            (Run, "microbatches", self._microbatches),
            (Run, "share", self._share),
            (Run, "call", lambda _, __, function, *args, **kw: function(*args, **kw)),
            (Run, "gather", _rows_of_one_rank),
            (Run, "weights", lambda *_: as_one_module(self._models).state_dict()),
            (Tensor, "item", _figure),
            (DataLoader, "__iter__", self._iterate),
            (ShardedLoader, "__iter__", self._iterate),
            (torch, "save", _do_nothing),
            (Run, "save", _do_nothing),
            (Run, "ema", _do_nothing),
            (Run, "evaluate", lambda *_: defaultdict(lambda: 1.0, samples=1.0)),
            (Run, "log_to", open_no_logger),
            (RunCheckpoints, "resume", lambda *_, **__: 0),
            (RunCheckpoints, "save", _do_nothing),
            (torch.nn.parallel, "DistributedDataParallel", lambda _, m, *__, **___: _Passed(m)),
        ):
            watch(stack, owner, name, make)

    def _make_optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **kw: Any) -> None:
        original(optimizer, *args, **kw)
        self._optimizers.append(optimizer)

    def _prepare(self, original: Any, run: Run, *things: Any) -> Any:
        models, _, loaders = sort_arguments(things)
        self._run = run
        self._models += models
        shared = iter(())
        if loaders:
            made = original(run, *loaders)
            shared = iter([made] if len(loaders) == 1 else made)
        results = [
            next(shared) if any(thing is loader for loader in loaders) else thing
            for thing in things
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def _forward_backward(
        self, original: Any, run: Run, compute_loss: Any, *batch: Any, **named: Any
    ) -> None:
        given = named.pop("rows", None)
        named.pop("reduction", None)
        tensors = [tensor for tensor in tensors_in((batch, named)) if tensor.dim()]
        if not tensors:  # the function has its batch itself, as a loop has
            result = compute_loss(*batch, **named)
            self._backward_of_run(None, run, result[0] if isinstance(result, tuple) else result)
        models = [model for model in self._models if is_trained(model)]
        if not models:
            raise UsageError(NOTHING_PREPARED)

        def compute(batch: Any, named: Any) -> Any:
            with self._precision():
                return compute_loss(*batch, **named)

        self._depth += 1  # these calls are no loop's
        made = self._optimizers_of
        work = trace_model(as_one_module(models), compute, made, (batch, named))
        used = [name for segment in work.segments for name in segment.parameters]
        if any(not any(n.startswith(prefix) for n in used) for prefix in named_models(models)):
            raise UsageError(SEVERAL_MODELS)
        rows = int(given or len(tensors[0]))
        self._end(Workload(work, as_one_module(models), rows, run._settings.accumulate))

    def _precision(self) -> Any:
        """Return the context in which the script's run computes its forward pass."""
        if self._run is None:
            return nullcontext()
        if any(isinstance(each, Compile) for each in self._run._prepared._strategies):
            raise UsageError(
                "shoal.init(compile=True): what a compiled model costs is not known before it is "
                "compiled. Plan without it."
            )
        dtype = self._run._settings.autocast
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def _optimizers_of(self, _: nn.Module) -> list[Optimizer]:
        """Return the optimizers of the script, which must all step the model."""
        if not self._optimizers:
            raise UsageError(f"the script has made no optimizer of torch.optim. {CURE}")
        return self._optimizers

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module; the first call of a model with gradients begins the passes to count."""
        if self._depth == 0 and torch.is_grad_enabled() and self._names.find(module) is not None:
            model = next(m for m in self._names.roots if any(m is module for m in m.modules()))
            if model.training and is_trained(model):
                self._begin(model, [t for t in tensors_in((args, kwargs)) if t.dim()])
        self._depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self._depth -= 1

    def _begin(self, model: nn.Module, inputs: list[Tensor]) -> None:
        if self._tracer is not None:
            if model is not self._model:
                raise UsageError(SEVERAL_MODELS)
            return
        self._model, self._inputs = model, inputs
        self._passes.enter_context(self._precision())
        self._tracer = self._passes.enter_context(counting(_unwrapped(model)))
        self._tracer.leave_out(inputs)

    def _backward_of_run(
        self, original: Any, run: Run, loss: Any, rows: int | None = None, reduction: str = "rows"
    ) -> None:
        self._is_loop_loss = original is not None
        terms = [loss] if isinstance(loss, Tensor) else [term.value for term in loss.terms]
        self._backward(torch.autograd.backward, sum(terms))

    def _microbatches(self, _: Any, run: Run, batch: Any) -> Iterator[Any]:
        """Yield one part of a batch: its backward pass ends the script."""
        self._parts = run._settings.accumulate

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return tree_map(value, cut)
            return value[: -(-len(value) // self._parts)] if value.dim() else value

        yield cut(batch)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Count the backward pass, and end the script."""
        if self._tracer is None or not self._inputs:
            original(tensors, *args, **kwargs)
            return
        tracer, self._tracer = self._tracer, None
        tracer.begin_backward()
        original(tensors, *args, **kwargs)
        self._passes.close()
        shapes = [tuple(tensor.shape) for tensor in self._inputs]
        batch_bytes = self._batch_bytes / self._parts
        step = CountedStep(tracer.segments, batch_bytes, self._rows or self._samples())
        if self._first is None:
            self._end(FirstRun(step, shapes, self._parts))
        if shapes == self._first.shapes:
            raise UsageError(
                "the script takes its batches from no torch.utils.data.DataLoader and no "
                f"run.share, so its loop cannot be counted with other numbers of samples. {CURE}"
            )
        model = _unwrapped(self._model)
        work = work_of_steps(model, self._optimizers_of, self._first.step, step, "")
        rows = self._first.step.samples * (1 if model is self._model else self._ranks)
        accumulate = 1 if self._run is None else self._run._settings.accumulate
        note = WITHOUT_SHOAL if self._run is None else ""
        self._end(Workload(work, model, rows * accumulate, accumulate, note, self._is_loop_loss))

    def _iterate(self, original: Any, loader: Any) -> Iterator[Any]:
        """Yield batches with as many rows as this run counts."""
        self._discard()
        for batch in original(loader):
            yield self._resize(batch)
            self._discard()

    def _share(self, original: Any, run: Run, batch: Any) -> Any:
        """Return a batch that the script has drawn, with as many rows as this run counts."""
        return self._resize(original(run, batch))

    def _resize(self, batch: Any) -> Any:
        """Return a batch whose rows come again and again, as many as this run counts."""

        def resize(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return tree_map(value, resize)
            rows = len(value) if value.dim() else 0
            if self._rows and rows and -(-2 * rows // self._parts) == self._rows:
                return value[torch.arange(2 * rows) % rows]
            return value

        batch = resize(batch)
        tensors = list(tensors_in(batch))
        self._batch_bytes = float(sum(tensor.nbytes for tensor in tensors))
        self._batch_rows = next((len(tensor) for tensor in tensors if tensor.dim()), 0)
        return batch

    def _samples(self) -> int:
        """Return the samples of the passes: the rows of the model's input, or of the part of a
        batch that it has several views of, or along another dimension.
        """
        shape, rows = self._inputs[0].shape, -(-self._batch_rows // self._parts)
        return rows if rows and (shape[0] % rows == 0 or rows in shape[:2]) else shape[0]

    def _discard(self) -> None:
        """Forget what was counted since the last batch: an evaluation or a trial, and no step."""
        self._tracer = None
        self._passes.close()

    def _end(self, found: Workload | FirstRun) -> NoReturn:
        self._passes.close()
        self.found = found
        raise EnoughSteps


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand for a function that writes a file, or needs weights."""


def _rows_of_one_rank(_: Any, run: Run, tensor: Tensor, views: int = 1) -> Tensor:
    """Return what `run.gather` does on one rank."""
    run._gathering._rows = slice(0, len(tensor))
    return tensor


def _figure(original: Any, tensor: Tensor) -> Any:
    """Return a number; 1 for a figure of an evaluation before the first step, without a value."""
    try:
        return original(tensor)
    except VALUE_NEEDED:
        if torch.is_grad_enabled() or not tensor.is_floating_point():
            raise
        return 1.0


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, _Passed) else model


def plan_in_script(
    words: Sequence[str], ranks: int, plan: Callable[..., T], *arguments: Any, accumulate: int = 0
) -> T:
    """Return `plan(workload, *arguments)`, called in the process of a script, which has its model.

    Args:
        words: the file of the script, and its own words.
        ranks: of the plan.
        plan: a function at the top of a module; it and its arguments and result are pickled.
        accumulate: micro-batches in the place of the script's own number; 0 for that.

    Raises: UsageError: the script cannot be followed; or what `plan` raised.
    """
    found: FirstRun | ShoalError | tuple[T] | None = None
    variables = VARIABLES | ({"SHOAL_ACCUMULATE": str(accumulate)} if accumulate else {})
    for _ in range(2):
        given = (tuple(words), ranks, found, plan, arguments)
        started = start(_follow, given, 1, variables, "lines", preload=preload.TRAINING)
        with World(started, LIMIT_S) as world:
            [found] = world.results()
        if isinstance(found, ShoalError):
            raise found
        if isinstance(found, tuple):
            return found[0]
    raise AssertionError("the second run answers")


def _follow(
    words: tuple[str, ...],
    ranks: int,
    first: FirstRun | None,
    plan: Callable[..., T],
    arguments: tuple[Any, ...],
) -> FirstRun | ShoalError | tuple[T]:
    path, *own = words
    try:
        found = script_workload(path, own, first, ranks)
        return found if isinstance(found, FirstRun) else (plan(found, *arguments),)
    except ShoalError as error:
        return error
