"""Parameters without memory, whose initialization is recorded and run later, as strategies need it.

      with empty_weights():       torch.empty returns tensors without memory, `EmptyTensor`
          model = GPT(config)     operators on them are recorded: normal_, mul_, copy_, ...

      weight.values()             runs the operators on which this weight depends, on the CPU

Each operator that draws has a seed of its own, so the values of a weight do not depend on which
weights this rank fills, nor in which order. They are other numbers than those of the model without
`empty_weights`, and of the same distribution.

An operator that reads a number, as `trunc_normal_` does to draw again, runs at once what that
depends on. What is written after the context, by `load_state_dict` say, is recorded as well.

A weight that is computed from values, such as `nn.Parameter(torch.zeros(8))`, has its memory at
once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from shoal.comm.axis import Axis
from shoal.data.seeds import derive_seed
from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import (
    DisableTorchFunctionSubclass,
    DispatchMode,
    make_wrapper_subclass,
)
from shoal.platform.torch_private.tensor_state import READ_NUMBER, has_hooks, memory_of, schema_of

_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_OVERWRITE = ("normal_", "uniform_", "zero_", "fill_", "copy_")
"""Operators that leave nothing of the values before."""
_ATTRIBUTES = ("form", "calls", "_is_param")
_PLACE = ("device", "pin_memory")
"""Arguments of operators that say where a tensor is to be."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_META = torch.device("meta")
_CPU = torch.device("cpu")


class EmptyTensor(Tensor):
    """A tensor on the CPU with a shape and no memory, whose values are computed when asked for.

    Args:
        form: a tensor on the meta device, of the same shape. Views share its storage.
        calls: records what is done with it.
    """

    form: Tensor
    calls: InitCalls

    def __new__(cls, form: Tensor, calls: InitCalls) -> EmptyTensor:
        made: EmptyTensor = make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride(),
            storage_offset=form.storage_offset(),
            dtype=form.dtype,
            device=_CPU,
        )
        made.form, made.calls = form, calls
        return made

    def __init__(self, form: Tensor, calls: InitCalls) -> None:
        super().__init__()

    def values(self) -> Tensor:
        """Run all on which this tensor depends, and return its values on the CPU."""
        return self.calls.values(self.form)

    def own_attributes(self) -> dict[str, Any]:
        """Return what a script or a library has noted at this tensor."""
        return {name: value for name, value in vars(self).items() if name not in _ATTRIBUTES}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == _SET_DATA and isinstance(args[0], cls):
            args[0].form, args[0].calls = args[1].form, args[1].calls
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        # What is written comes first: its calls must know.
        tensors = [*_written(func, args, options), *tree_leaves((args, options))]
        calls = next(leaf.calls for leaf in tensors if isinstance(leaf, cls))
        return calls.call(func, args, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # torch's own would copy the form, whose storage no call has written.
        copied = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"EmptyTensor({tuple(self.shape)}, dtype={self.dtype})"


class _RecordedCall(NamedTuple):
    """An operator that has written into tensors without memory, or has made one.

    Attributes:
        made: the forms of its result, where that has a memory of its own; else None.
        reads, writes: `memory_of` forms.
        overwrites: True if nothing is left of what was there.
    """

    seed: int
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: bool


class InitCalls:
    """The operators on tensors without memory, in their order.

    They keep their tensors' forms, so that no memory is taken for another.

    Args: seed: from which the seeds of operators follow.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._calls: list[_RecordedCall] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # indices of calls by memory

    def empty(self, func: Any, args: Any, options: dict[str, Any]) -> EmptyTensor:
        """Return the tensor that a function such as `torch.empty` makes, without memory."""
        form = func(*args, **(options | {"device": _META}))
        self._add(func, args, options, form, frozenset(), _memories(form), True)
        return EmptyTensor(form, self)

    def call(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Record an operator, some of whose arguments have no memory, and return its result.

        One that returns a number, or writes into a tensor with memory, is run.
        """
        written = _written(func, args, options)
        if func is READ_NUMBER or any(not isinstance(each, EmptyTensor) for each in written):
            arguments, options = tree_map(_with_values, (args, options))
            return func(*arguments, **options)
        arguments, keywords = tree_map(self._argument, (args, options))
        here = keywords | {"device": _META} if keywords.get("device") else keywords
        result = func(*_on_meta(arguments), **_on_meta(here))
        read = _memories((arguments, keywords))
        if written:
            forms = [each.form for each in written]
            writes = _memories(forms)
            # `w.copy_(w.t())` needs what was there.
            is_new = func.__name__.split(".")[0] in _OVERWRITE and all(map(_is_whole, forms))
            is_new = is_new and not writes & _memories(arguments[1:])
            self._add(func, arguments, keywords, None, read, writes, is_new)
            return written[0] if isinstance(result, Tensor) else result
        if made := _memories(result) - read:
            self._add(func, arguments, keywords, result, read, made, True)
        return tree_map(self._without_memory, result)

    def overwrite(self, form: Tensor, read: Callable[[], Tensor]) -> None:
        """Record that a form gets the values that `read` returns."""

        def copy(tensor: Tensor) -> None:
            tensor.copy_(read())

        self._add(copy, (form,), {}, None, _memories(form), _memories(form), _is_whole(form))

    def values(self, form: Tensor) -> Tensor:
        """Run the calls on which a form depends, and return its values on the CPU."""
        storages: dict[int, torch.UntypedStorage] = {}

        def filled(item: Any) -> Any:
            """Return the tensor with memory in place of a form."""
            if not (isinstance(item, Tensor) and item.is_meta):
                return item
            memory = memory_of(item)
            if memory not in storages:  # it is overwritten before anything reads it
                storages[memory] = torch.UntypedStorage(item.untyped_storage().nbytes())
            empty = torch.empty(0, dtype=item.dtype)
            return empty.set_(storages[memory], item.storage_offset(), item.size(), item.stride())

        state = torch.default_generator.get_state()
        try:
            with torch.no_grad():
                for call in self._calls_for(form):
                    torch.default_generator.manual_seed(call.seed)
                    arguments, options = tree_map(filled, (call.args, call.kwargs))
                    result = call.function(*arguments, **options)
                    pairs = zip(tree_leaves(call.made), tree_leaves(result), strict=False)
                    for made, tensor in pairs:  # made is None where nothing new was made
                        if isinstance(made, Tensor):
                            storages[memory_of(made)] = tensor.untyped_storage()
                values: Tensor = filled(form)
                return values
        finally:
            torch.default_generator.set_state(state)

    def _add(self, func: Any, args: Any, options: dict[str, Any], *rest: Any) -> None:
        kept = {key: value for key, value in options.items() if key not in _PLACE}
        index = len(self._calls)
        call = _RecordedCall(derive_seed(self.seed, index), func, args, kept, *rest)
        self._calls.append(call)
        for memory in call.writes:
            self._writers[memory].append(index)

    def _argument(self, leaf: Any) -> Any:
        """Return the form of a tensor without memory, and a copy of one that may change later."""
        if isinstance(leaf, EmptyTensor):
            return leaf.form if leaf.calls is self else leaf.values()
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    def _without_memory(self, leaf: Any) -> Any:
        return EmptyTensor(leaf, self) if isinstance(leaf, Tensor) else leaf

    def _calls_for(self, form: Tensor) -> list[_RecordedCall]:
        """Return the calls on which a form depends, in their order."""
        chosen: set[int] = set()
        needed = [(memory_of(form), len(self._calls))]  # the values of a memory before a call
        while needed:
            memory, before = needed.pop()
            earlier = [index for index in self._writers[memory] if index < before]
            assert earlier, "a tensor without memory that nobody has written"
            for index in reversed(earlier):
                call = self._calls[index]
                if index not in chosen:
                    chosen.add(index)
                    needed += [(other, index) for other in call.reads - call.writes]
                if call.overwrites:
                    break
        return [self._calls[index] for index in sorted(chosen)]


class _EmptyFactory(DispatchMode):
    """Inside, `torch.empty` returns tensors without memory."""

    def __init__(self, calls: InitCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _EMPTY and options.get("device") != _META:
            return self._calls.empty(func, args, options)
        return func(*args, **options)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules in this context whose parameters have no memory.

    Their initialization is run by `run.prepare`, layer by layer, on the CPU; or their values are
    read by `load_weights`. Buffers, and parameters that are made of values, such as
    `nn.Parameter(torch.zeros(8))`, are as always. Random numbers follow from one that the context
    draws of torch's generator, which must be in the same state on all ranks, as `shoal.init` leaves
    it. They are the same under every strategy and on every number of ranks.
    """
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    with _EmptyFactory(InitCalls(seed)):
        yield


def _memories(tree: Any) -> frozenset[int]:
    """Return `memory_of` each form."""
    forms = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_meta)
    return frozenset(map(memory_of, forms))


def _on_meta(tree: Any) -> Any:
    """Return arguments without memory, for kernels of the meta device take no others."""
    return tree_map(lambda leaf: leaf.to(_META) if isinstance(leaf, Tensor) else leaf, tree)


def _with_values(leaf: Any) -> Any:
    return leaf.values() if isinstance(leaf, EmptyTensor) else leaf


def _written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """Return the tensors that an operator writes into."""
    arguments = schema_of(func).arguments
    given = {each.name: arg for each, arg in zip(arguments, args, strict=False)} | options
    names = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
    leaves = tree_leaves([given.get(name) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _is_whole(form: Tensor) -> bool:
    return form.numel() * form.element_size() == form.untyped_storage().nbytes()


class DeferredWeights:
    """The weights of a model that have no memory yet.

    Args: device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor; those without memory on the device of this rank."""
        return tensor.values().to(self._device) if isinstance(tensor, EmptyTensor) else tensor

    def fill(
        self, modules: Iterable[nn.Module], axis: Axis | None = None, keeps: bool = False
    ) -> None:
        """Give the tensors of modules memory and values.

        Args:
            modules: with all modules inside of them.
            axis: the ranks that hold the same tensors. The first of them makes the values, and
                sends them to the others: collective over the axis. None if each makes its own.
            keeps: the parameters stay the objects that they are, with new memory, for optimizers
                that are bound later. Else modules get new ones, which nobody else holds.

        Raises: UsageError: a tensor has a hook, which would be lost.
        """
        new: dict[int, tuple[Tensor, Tensor]] = {}  # tied tensors stay tied
        for module in (inner for outer in modules for inner in outer.modules()):
            for name, tensor in list(_empty_tensors(module)):
                if id(tensor) not in new:
                    new[id(tensor)] = tensor, self._filled(name, tensor, axis)
                filled = new[id(tensor)][1]
                if keeps:
                    swap_tensors(tensor, filled)
                else:
                    # Through the module: an LSTM keeps a list of its weights besides.
                    setattr(module, name, filled)

    def _filled(self, name: str, tensor: EmptyTensor, axis: Axis | None) -> Tensor:
        """Return a tensor with memory and values, in the place of one without."""
        if has_hooks(tensor):
            raise UsageError(
                f"prepare: {name} {tuple(tensor.shape)} has a hook, and gets its memory just now, "
                "as another tensor. Register hooks after run.prepare."
            )
        if axis is None or axis.rank == 0:
            values = self.values(tensor)
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if axis is not None:
            axis.broadcast_tensor(values)
        if not isinstance(tensor, nn.Parameter):
            return values
        filled = nn.Parameter(values, tensor.requires_grad)
        vars(filled).update(tensor.own_attributes())
        return filled


def deferred_weights(model: nn.Module, device: torch.device) -> DeferredWeights | None:
    """Return the weights of a model that have no memory yet; None if all have."""
    return DeferredWeights(device) if empty_bytes(model) else None


def empty_bytes(model: nn.Module) -> int:
    """Return the bytes that the weights of a model will take which have no memory yet."""
    empty = dict.fromkeys(t for module in model.modules() for _, t in _empty_tensors(module))
    return sum(tensor.numel() * tensor.element_size() for tensor in empty)


def seeds_of(model: nn.Module) -> list[int]:
    """Return the seeds from which the weights of a model without memory follow, in their order."""
    empty = (tensor for module in model.modules() for _, tensor in _empty_tensors(module))
    return [calls.seed for calls in dict.fromkeys(tensor.calls for tensor in empty)]


def broadcast_filled(model: nn.Module, axis: Axis) -> None:
    """Copy the first rank's parameters and buffers that have memory to all. Collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, EmptyTensor):
            axis.broadcast_tensor(tensor.detach())


def _empty_tensors(module: nn.Module) -> Iterator[tuple[str, EmptyTensor]]:
    """Yield the own parameters and buffers of a module that have no memory."""
    for store in (own_parameters(module), own_buffers(module)):
        for name, tensor in store.items():
            if isinstance(tensor, EmptyTensor):
                yield name, tensor
