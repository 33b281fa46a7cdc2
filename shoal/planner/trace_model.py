"""Count the work of a model: one step on tensors without memory, with two numbers of samples.

      forward    hooks of modules say whose code runs: that is the segment of an operation
      backward   a saved tensor says which segment has saved it: that segment's backward pass runs

Activations are counted by their memory: alive from the operation that makes it until the last
reference to it goes. So what autograd keeps, what a function frees early and what views share is
seen and not assumed. No weights are needed: a model of 70 billion parameters takes seconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from shoal.costs.work import Affine, ModelWork, ParameterWork, SegmentWork
from shoal.errors import ShoalError, UsageError
from shoal.planner.optimizer_work import (
    CountedOp,
    affine,
    affine_ops,
    num_bytes,
    optimizer_work,
    storage_key,
    tensors_of,
)
from shoal.platform.torch_private.fake_tensors import (
    VALUE_NEEDED,
    fake_tensors,
    kernel_flops,
)
from shoal.platform.torch_private.pytree import tree_map
from shoal.platform.torch_private.subclasses import DispatchMode
from shoal.strategies.loss_terms import split_result

SAMPLES = (2, 4)
"""Numbers of samples of the two steps: activations scale with the batch, so the difference is their
slope. One sample takes other ways in some models.
"""

NEEDS_VALUE = (
    "asks for the value of a tensor ({error}), and a plan is made without values. Leave out "
    ".item(), bool() and nonzero() in the forward pass."
)
Loss = Callable[..., Any]
MakeOptimizer = Callable[[nn.Module], Optimizer | Sequence[Optimizer]]
"""Returns the optimizer of a model; several where they step different parameters."""


@dataclass(eq=False)
class TracedSegment:
    """One segment while it is counted.

    Attributes: start, end: bytes of activations that were alive before and after it.
    """

    path: str
    index: int
    start: float
    end: float = 0.0
    forward_most: float = 0.0
    backward_most: float = float("-inf")
    gradient_most: float = float("-inf")
    output_bytes: float = 0.0
    forward: list[CountedOp] = field(default_factory=list)
    backward: list[CountedOp] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CountedStep:
    """The operations of a forward and a backward pass with so many samples."""

    segments: list[TracedSegment]
    input_bytes: float
    samples: int


def trace_model(
    model: nn.Module, compute_loss: Loss, make_optimizer: MakeOptimizer, batch: Any, name: str = ""
) -> ModelWork:
    """Count the work of one training step. The model is not changed, and never sees data.

    Args:
        compute_loss: called as `compute_loss(*batch)`; returns a loss, or a loss and more.
        make_optimizer: returns the optimizer of the model's parameters.
        batch: a nest of tensors; dimension 0 is the batch. Only shapes and dtypes are used.

    Raises: UsageError: the model cannot run without values.
    """
    with fake_tensors(), without_memory(model):
        low, high = (
            _count(model, compute_loss, _resized(batch, samples), samples) for samples in SAMPLES
        )
    return work_of_steps(model, make_optimizer, low, high, name)


def work_of_steps(
    model: nn.Module, make_optimizer: MakeOptimizer, low: CountedStep, high: CountedStep, name: str
) -> ModelWork:
    """Return the work of a model from two counted steps with different numbers of samples.

    Raises: UsageError: the steps differ in more than their samples; the optimizer has other
        parameters.
    """
    # An optimizer may hold the parameters as they were before.
    names = {id(p): parameter_name for parameter_name, p in model.named_parameters()}
    with fake_tensors(), without_memory(model):
        names |= {id(p): parameter_name for parameter_name, p in model.named_parameters()}
        parameters, buffers = _tensors_of(model)
        optimizer = optimizer_work(make_optimizer(model), names)
    samples = (low.samples, high.samples)
    return ModelWork(
        name or type(model).__name__,
        _affine_segments(low.segments, high.segments, samples),
        tuple(replace(p, optimizer_bytes=optimizer.states.get(p.name, 0.0)) for p in parameters),
        buffers,
        affine(low.input_bytes, high.input_bytes, samples),
        optimizer.ops,
        optimizer.extra,
    )


@contextmanager
def without_memory(model: nn.Module) -> Iterator[None]:
    """Let parameters and buffers be tensors without memory, inside this context."""
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    fakes: dict[int, Tensor] = {}
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module in model.modules():
            tensors = [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
            for name, tensor in tensors:
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = _fake_like(tensor)
                replaced.append((module, name, tensor))
                setattr(module, name, fakes[id(tensor)])
        model.train()
        yield
    finally:
        for module, name, tensor in replaced:
            setattr(module, name, tensor)
        for module, training in modes:
            module.training = training


def _fake_like(tensor: Tensor) -> Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _resized(batch: Any, samples: int) -> Any:
    """Return tensors of the same shapes for another number of samples."""

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        shape = (samples, *value.shape[1:])
        # A model on the meta device is followed on the CPU, and so is such a batch.
        device = "cpu" if value.is_meta else value.device
        return torch.empty(shape, dtype=value.dtype, device=device)

    return tree_map(resize, batch)


def _count(model: nn.Module, compute_loss: Loss, batch: Any, samples: int) -> CountedStep:
    """Run one forward and backward pass, and return its operations."""
    size = num_bytes(batch)
    try:
        with counting(model) as tracer:
            tracer.leave_out(tensors_of(batch))  # a view of a batch takes no more memory
            terms, _ = split_result(compute_loss(*batch))
            del batch
            tracer.begin_backward()
            torch.autograd.backward(sum(term.value for term in terms))  # type: ignore[arg-type]
    except ShoalError:
        raise
    except VALUE_NEEDED as error:
        raise UsageError(f"the model or its loss {NEEDS_VALUE.format(error=error)}") from error
    except Exception as error:
        raise UsageError(
            f"the model cannot be counted: its step on tensors without values fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    return CountedStep(tracer.segments, size, samples)


@contextmanager
def counting(model: nn.Module) -> Iterator[StepTracer]:
    """Count the operations inside this context; call `begin_backward` between both passes."""
    counter = FlopCounterMode(display=False, custom_mapping=dict(kernel_flops()))
    tracer = StepTracer(model, counter)
    with counter, tracer, tracer.watching():
        yield tracer


class StepTracer(DispatchMode):
    """Notes every operation of a step, and the bytes that are alive after it.

    Attributes:
        segments: in the order of the forward pass.
        alive: bytes of activations that are alive.
        gradients: bytes of gradients of weights that have been accumulated.
    """

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        super().__init__()
        self.segments: list[TracedSegment] = []
        self.alive = self.gradients = 0.0
        self._model = model
        self._counter = counter
        self._flops = 0
        self._stack = [""]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._unused = {id(p): name for name, p in model.named_parameters()}
        self._current: TracedSegment | None = None
        self._is_backward = False
        self._storages: dict[int, float] = {}
        self._behind: list[float] = []
        # Held, for the key of a tensor that is gone may be that of another one.
        self._left_out: list[Tensor] = []
        tensors = [*model.parameters(), *model.buffers()]
        self._not_activations = {storage_key(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
        if not outputs:
            return result
        segment = self._segment()
        if not self._is_backward:
            for tensor in inputs:
                if (name := self._unused.pop(id(tensor), None)) is not None:
                    segment.parameters.append(name)
        for output in outputs:
            self._notice(output)
        ops = segment.backward if self._is_backward else segment.forward
        ops += self._ops(func, inputs, outputs)
        self._note_peak(segment)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow calls of modules, saved tensors and gradients inside this context."""
        with ExitStack() as stack:
            for module in self._model.modules():
                before = module.register_forward_pre_hook(self._enter)
                after = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
                    stack.callback(hook.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            yield

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of tensors as activations."""
        self._left_out += tensors
        self._not_activations |= {storage_key(tensor) for tensor in self._left_out}

    def begin_backward(self) -> None:
        self._close_segment()
        sizes = {name: float(p.nbytes) for name, p in self._model.named_parameters()}
        behind = 0.0
        for segment in reversed(self.segments):
            self._behind.append(behind)
            behind += sum(sizes[name] for name in segment.parameters)
        self._behind.reverse()
        self._is_backward = True
        self._current = self.segments[-1]

    def _segment(self) -> TracedSegment:
        """Return the segment of the operation that has run; begin one if other code runs."""
        path = self._stack[-1]
        if self._is_backward or (self._current is not None and self._current.path == path):
            assert self._current is not None
            return self._current
        self._close_segment()
        self._current = TracedSegment(path, len(self.segments), self.alive)
        self.segments.append(self._current)
        return self._current

    def _close_segment(self) -> None:
        if self._current is not None:
            self._current.end = self.alive

    def _note_peak(self, segment: TracedSegment) -> None:
        if not self._is_backward:
            segment.forward_most = max(segment.forward_most, self.alive - segment.start)
            return
        held = self.alive - segment.end
        segment.backward_most = max(segment.backward_most, held)
        behind = self._behind[segment.index]
        segment.gradient_most = max(segment.gradient_most, held + self.gradients - behind)

    def _notice(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._not_activations or key in self._storages:
            return
        self._storages[key] = float(storage.nbytes())
        self.alive += self._storages[key]
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        size = self._storages.pop(key, None)
        if size is not None:
            self.alive -= size
        self._not_activations.discard(key)

    def _accumulated(self, parameter: Tensor) -> None:
        """Count a gradient as such, from when it is accumulated."""
        assert parameter.grad is not None
        key = storage_key(parameter.grad)
        if (size := self._storages.pop(key, None)) is not None:
            self.alive -= size
            self.gradients += size
            self._not_activations.add(key)

    def _ops(
        self, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[CountedOp]:
        total = self._counter.get_total_flops()
        flops, self._flops = total - self._flops, total
        written_in_place = any(output is tensor for output in outputs for tensor in inputs)
        known = {storage_key(tensor) for tensor in inputs}
        if not written_in_place and all(storage_key(output) in known for output in outputs):
            return [CountedOp("view", 0.0, 0.0)]
        kind = "memory"
        if flops:
            kind = "conv" if "conv" in str(func) else "matmul"
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        itemsize = outputs[0].itemsize if outputs else 4
        # An LSTM computes one element of its sequence after another.
        number = len(inputs[0]) if "rnn_layer" in str(func) else 1
        return [CountedOp(kind, flops / number, moved / number, itemsize)] * number

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._stack.pop()
        if self._current is not None and not self._is_backward:
            self._current.output_bytes = num_bytes(output)

    def _pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        return len(self.segments) - 1, tensor

    def _unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        index, tensor = packed
        if self._is_backward:
            # What is saved before its segment's first operation belongs to that before.
            self._current = self.segments[max(index, 0)]
        return tensor


def _affine_segments(
    first: Sequence[TracedSegment], second: Sequence[TracedSegment], samples: tuple[int, int]
) -> tuple[SegmentWork, ...]:
    if [segment.path for segment in first] != [segment.path for segment in second]:
        raise UsageError(
            "the model takes other ways for other numbers of samples, so its cost for a share of "
            "the batch is not known."
        )
    return tuple(_affine_segment(a, b, samples) for a, b in zip(first, second, strict=True))


def _affine_segment(a: TracedSegment, b: TracedSegment, samples: tuple[int, int]) -> SegmentWork:
    def line(first: float, second: float) -> Affine:
        low, high = (value if value > float("-inf") else 0.0 for value in (first, second))
        return affine(low, high, samples)

    return SegmentWork(
        a.path,
        affine_ops(a.forward, b.forward, samples),
        affine_ops(a.backward, b.backward, samples),
        line(a.end - a.start, b.end - b.start),
        line(a.forward_most, b.forward_most),
        line(a.backward_most, b.backward_most),
        line(a.gradient_most, b.gradient_most),
        line(a.output_bytes, b.output_bytes),
        tuple(a.parameters),
    )


def _tensors_of(model: nn.Module) -> tuple[list[ParameterWork], float]:
    parameters = [
        ParameterWork(name, tuple(p.shape), p.element_size(), p.requires_grad, 0.0)
        for name, p in model.named_parameters()
    ]
    return parameters, float(sum(buffer.nbytes for buffer in model.buffers()))
