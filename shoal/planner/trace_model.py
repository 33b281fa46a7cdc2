"""Count the work of a model: one step on tensors without memory, with two numbers of samples.

      forward    hooks of modules say whose code runs: that is the segment of an operation
      backward   a saved tensor says which segment has saved it: that segment's backward pass runs

Activations are counted by their memory: alive from the operation that makes it until the last
reference to it goes. So what autograd keeps, what a function frees early and what views share is
seen and not assumed. No weights are needed: a model of 70 billion parameters takes seconds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from shoal.costs.work import Affine, ModelWork, OpWork, ParameterWork, SegmentWork
from shoal.errors import ShoalError, UsageError
from shoal.platform.torch_private.fake_tensors import (
    VALUE_NEEDED,
    attention_flops,
    fake_tensors,
)
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import DispatchMode, disable_dispatch_modes
from shoal.strategies.loss_terms import Counted

SAMPLES = (2, 4)
"""Numbers of samples of the two steps. One sample takes other ways in some models."""

Loss = Callable[..., Any]
MakeOptimizer = Callable[[nn.Module], Optimizer]


class _CountedOp(NamedTuple):
    kind: str
    flops: float
    moved_bytes: float


@dataclass(eq=False)
class _TracedSegment:
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
    forward: list[_CountedOp] = field(default_factory=list)
    backward: list[_CountedOp] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)


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
    counted = []
    # An optimizer may hold the parameters as they were before.
    names = {id(p): parameter_name for parameter_name, p in model.named_parameters()}
    with fake_tensors(), _without_memory(model):
        # Activations scale with the batch, so the difference of two steps is their slope.
        for samples in SAMPLES:
            counted.append(_count(model, compute_loss, _resized(batch, samples)))
        segments = _affine_segments(*counted)
        parameters, buffers = _tensors_of(model)
        names |= {id(p): parameter_name for parameter_name, p in model.named_parameters()}
        optimizer = _optimizer_work(make_optimizer(model), names)
    return ModelWork(
        name or type(model).__name__,
        segments,
        tuple(replace(p, optimizer_bytes=optimizer.states.get(p.name, 0.0)) for p in parameters),
        buffers,
        _affine(*(_num_bytes(_resized(batch, samples, "meta")) for samples in SAMPLES)),
        optimizer.ops,
        optimizer.extra,
    )


@contextmanager
def _without_memory(model: nn.Module) -> Iterator[None]:
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


def _resized(batch: Any, samples: int, device: str | None = None) -> Any:
    """Return tensors of the same shapes for another number of samples."""

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        shape = (samples, *value.shape[1:])
        return torch.empty(shape, dtype=value.dtype, device=device or value.device)

    return tree_map(resize, batch)


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def _num_bytes(nest: Any) -> float:
    return float(sum(tensor.nbytes for tensor in _tensors(nest)))


def _count(model: nn.Module, compute_loss: Loss, batch: Any) -> list[_TracedSegment]:
    """Run one forward and backward pass, and return its segments."""
    counter = FlopCounterMode(display=False, custom_mapping=dict(attention_flops()))
    tracer = _StepTracer(model, counter)
    try:
        with counter, tracer, tracer.watching():
            loss = compute_loss(*batch)
            loss = loss[0] if isinstance(loss, tuple) and not hasattr(loss, "_fields") else loss
            if isinstance(loss, Counted):
                loss = sum(term.value for term in loss.terms)
            del batch
            tracer.begin_backward()
            loss.backward()
    except ShoalError:
        raise
    except VALUE_NEEDED as error:
        raise UsageError(
            f"the model or its loss asks for the value of a tensor ({error}), and a plan is made "
            "without values. Leave out .item(), bool() and nonzero() in the forward pass."
        ) from error
    except Exception as error:
        raise UsageError(
            f"the model cannot be counted: its step on tensors without values fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    return tracer.segments


class _StepTracer(DispatchMode):
    """Notes every operation of a step, and the bytes that are alive after it.

    Attributes:
        segments: in the order of the forward pass.
        alive: bytes of activations that are alive.
        gradients: bytes of gradients of weights that have been accumulated.
    """

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        super().__init__()
        self.segments: list[_TracedSegment] = []
        self.alive = self.gradients = 0.0
        self._model = model
        self._counter = counter
        self._flops = 0
        self._stack = [""]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._unused = {id(p): name for name, p in model.named_parameters()}
        self._current: _TracedSegment | None = None
        self._is_backward = False
        self._storages: dict[int, float] = {}
        self._behind: list[float] = []
        tensors = [*model.parameters(), *model.buffers()]
        self._not_activations = {_key(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
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
        ops.append(self._op(func, inputs, outputs))
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

    def _segment(self) -> _TracedSegment:
        """Return the segment of the operation that has run; begin one if other code runs."""
        path = self._stack[-1]
        if self._is_backward or (self._current is not None and self._current.path == path):
            assert self._current is not None
            return self._current
        self._close_segment()
        self._current = _TracedSegment(path, len(self.segments), self.alive)
        self.segments.append(self._current)
        return self._current

    def _close_segment(self) -> None:
        if self._current is not None:
            self._current.end = self.alive

    def _note_peak(self, segment: _TracedSegment) -> None:
        if not self._is_backward:
            segment.forward_most = max(segment.forward_most, self.alive - segment.start)
            return
        held = self.alive - segment.end
        segment.backward_most = max(segment.backward_most, held)
        behind = self._behind[segment.index]
        segment.gradient_most = max(segment.gradient_most, held + self.gradients - behind)

    def _notice(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = _key(tensor)
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
        key = _key(parameter.grad)
        if (size := self._storages.pop(key, None)) is not None:
            self.alive -= size
            self.gradients += size
            self._not_activations.add(key)

    def _op(self, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _CountedOp:
        total = self._counter.get_total_flops()
        flops, self._flops = total - self._flops, total
        written_in_place = any(output is tensor for output in outputs for tensor in inputs)
        known = {_key(tensor) for tensor in inputs}
        if not written_in_place and all(_key(output) in known for output in outputs):
            return _CountedOp("view", 0.0, 0.0)
        kind = "memory"
        if flops:
            kind = "conv" if "conv" in str(func) else "matmul"
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        return _CountedOp(kind, float(flops), float(moved))

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._stack.pop()
        if self._current is not None and not self._is_backward:
            self._current.output_bytes = _num_bytes(output)

    def _pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        return len(self.segments) - 1, tensor

    def _unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        index, tensor = packed
        if self._is_backward:
            # What is saved before its segment's first operation belongs to that before.
            self._current = self.segments[max(index, 0)]
        return tensor


def _key(tensor: Tensor) -> int:
    """Return a number that tells the memory of a tensor from that of others."""
    return id(tensor.untyped_storage())


def _affine_segments(
    first: Sequence[_TracedSegment], second: Sequence[_TracedSegment]
) -> tuple[SegmentWork, ...]:
    if [segment.path for segment in first] != [segment.path for segment in second]:
        raise UsageError(
            "the model takes other ways for other numbers of samples, so its cost for a share of "
            "the batch is not known."
        )
    return tuple(_affine_segment(a, b) for a, b in zip(first, second, strict=True))


def _affine_segment(a: _TracedSegment, b: _TracedSegment) -> SegmentWork:
    def relative(value: float) -> float:
        return value if value > float("-inf") else 0.0

    return SegmentWork(
        a.path,
        _affine_ops(a.forward, b.forward),
        _affine_ops(a.backward, b.backward),
        _affine(a.end - a.start, b.end - b.start),
        _affine(a.forward_most, b.forward_most),
        _affine(relative(a.backward_most), relative(b.backward_most)),
        _affine(relative(a.gradient_most), relative(b.gradient_most)),
        _affine(a.output_bytes, b.output_bytes),
        tuple(a.parameters),
    )


def _affine(first: float, second: float) -> Affine:
    """Return the line through the values of two numbers of samples."""
    low, high = SAMPLES
    slope = (second - first) / (high - low)
    return Affine(first - slope * low, slope)


def _affine_ops(first: Sequence[_CountedOp], second: Sequence[_CountedOp]) -> tuple[OpWork, ...]:
    """Return the operations of a segment, equal ones together."""
    if [op.kind for op in first] != [op.kind for op in second]:
        second = [op._replace(flops=2 * op.flops, moved_bytes=2 * op.moved_bytes) for op in first]
    counts = Counter(
        (a.kind, _affine(a.flops, b.flops), _affine(a.moved_bytes, b.moved_bytes))
        for a, b in zip(first, second, strict=True)
    )
    return tuple(OpWork(*key, count) for key, count in counts.items())


def _tensors_of(model: nn.Module) -> tuple[list[ParameterWork], float]:
    parameters = [
        ParameterWork(name, tuple(p.shape), p.element_size(), p.requires_grad, 0.0)
        for name, p in model.named_parameters()
    ]
    return parameters, float(sum(buffer.nbytes for buffer in model.buffers()))


class _StepCounter(DispatchMode):
    """Notes the operations of an optimizer's step, and the most bytes that it holds at once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.ops: list[_CountedOp] = []
        self.most = 0.0
        self._alive: dict[int, float] = {}
        self._known = {_key(tensor) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        if not outputs:
            return result
        self.ops.append(_CountedOp("memory", 0.0, _num_bytes((args, kwargs, result))))
        for output in outputs:
            key, storage = _key(output), output.untyped_storage()
            if key not in self._known and key not in self._alive:
                self._alive[key] = float(storage.nbytes())
                weakref.finalize(storage, self._alive.pop, key, None).atexit = False
        self.most = max(self.most, sum(self._alive.values()))
        return result


class _OptimizerWork(NamedTuple):
    """The step of an optimizer.

    Attributes:
        states: bytes of the state of each parameter, by name.
        ops: of all parameters.
        extra: the most bytes held at once besides the states, as a share of the parameter.
    """

    states: dict[str, float]
    ops: tuple[OpWork, ...]
    extra: float


def _optimizer_work(optimizer: Optimizer, names: dict[int, str]) -> _OptimizerWork:
    """Count a step of one parameter of each shape, and put it together for all parameters.

    Args: names: name of each parameter, by its id.

    Raises: UsageError: a parameter is not the model's.
    """
    counted: dict[Any, tuple[float, tuple[OpWork, ...], float]] = {}
    states: dict[str, float] = {}
    ops: Counter[OpWork] = Counter()
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's. Make it with model.parameters()."
                )
            key = (number, tuple(parameter.shape), parameter.dtype)
            if key not in counted:
                counted[key] = _step_of_one(type(optimizer), options, parameter)
            size, ops_of_one, _ = counted[key]
            states[names[id(parameter)]] = size
            ops.update({op._replace(number=1): op.number for op in ops_of_one})
    merged = tuple(op._replace(number=number) for op, number in ops.items())
    return _OptimizerWork(states, merged, max((c[2] for c in counted.values()), default=0.0))


def _step_of_one(
    kind: Any, options: dict[str, Any], like: Tensor
) -> tuple[float, tuple[OpWork, ...], float]:
    """Return the state's bytes, the operations and the extra share of one parameter's step."""
    try:
        return _count_step(kind, options, like)
    except VALUE_NEEDED:  # some optimizers read values, and tensors without memory have none
        with disable_dispatch_modes():
            return _count_step(kind, options, like)


def _count_step(
    kind: Any, options: dict[str, Any], like: Tensor
) -> tuple[float, tuple[OpWork, ...], float]:
    parameter = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))
    parameter.grad = torch.zeros(like.shape, dtype=like.dtype)
    optimizer = kind([{**options, "params": [parameter]}])
    optimizer.step()  # makes the state
    state = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    with _StepCounter([parameter, parameter.grad, *state]) as counter:
        optimizer.step()
    ops = _affine_ops(counter.ops, counter.ops)
    return _num_bytes(state), ops, counter.most / max(parameter.nbytes, 1)
