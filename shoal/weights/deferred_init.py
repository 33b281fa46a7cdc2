"""Parameters without memory, whose initialization is recorded and run later.

      with empty_weights():       torch.empty returns tensors on the meta device
          model = GPT(config)     every operator on them is recorded: normal_, mul_, copy_, ...

      initial_values(weight)      runs the operators on which this weight depends, on the CPU

Each operator that draws has a seed of its own, so the values of a weight do not depend on which
weights this rank fills, nor in which order. They are other numbers than those of the model without
`empty_weights`, and of the same distribution.

A weight that is computed from values, such as `nn.Parameter(torch.zeros(8))`, has its memory at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.data.seeds import derive_seed
from shoal.errors import UsageError
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import DispatchMode
from shoal.platform.torch_private.tensor_state import READ_NUMBER, memory_of, schema_of

_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_OVERWRITE = ("normal_", "uniform_", "zero_", "fill_", "copy_")
"""Operators that leave nothing of the values before."""
_PLACE = ("device", "pin_memory")
"""Arguments of operators that say where a tensor is to be."""
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = Tensor.device.__get__
_META = torch.device("meta")
_CPU = torch.device("cpu")


class _RecordedCall(NamedTuple):
    """An operator that has written into tensors without memory, or has made one.

    Attributes:
        made: the result, where it has a memory of its own; else None.
        reads, writes: `memory_of` tensors without memory.
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


class _InitRecorder(DispatchMode):
    """Records the operators on tensors without memory, in their order.

    Attributes:
        known: memories that are written. The calls keep their tensors, so that none is used twice.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.known: set[int] = set()
        self._seed = seed
        self._calls: list[_RecordedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        read = _memories((args, options))
        if func is READ_NUMBER and read:
            return self.values(args[0]).item()
        if func in _EMPTY or (read and options.get("device")):
            here = options | {"device": _META}
        else:
            here = options
        result = func(*_on_meta(args), **_on_meta(here)) if read else func(*args, **here)
        written = _written(func, args, options) if read else []
        if not read <= self.known or any(not tensor.is_meta for tensor in written):
            raise UsageError(
                f"shoal.empty_weights: {func} cannot be run later, for it takes a value that is "
                "not known then, or writes into a tensor that has memory. Build the module that "
                "calls it outside of the context."
            )
        if written:
            is_new = func.__name__.split(".")[0] in _OVERWRITE and all(map(_is_whole, written))
            self._add(func, args, options, None, read, _memories(written), is_new)
        elif made := _memories(result) - read:
            self._add(func, args, options, result, read, made, True)
        return result

    def _add(self, func: Any, args: Any, options: dict[str, Any], *rest: Any) -> None:
        options = {key: value for key, value in options.items() if key not in _PLACE}
        kept = tree_map(_kept, (args, options))
        call = _RecordedCall(derive_seed(self._seed, len(self._calls)), func, *kept, *rest)
        self._calls.append(call)
        self.known |= call.writes

    def values(self, tensor: Tensor) -> Tensor:
        """Run the calls on which a tensor depends, and return its values on the CPU."""
        storages: dict[int, torch.UntypedStorage] = {}

        def filled(item: Any) -> Any:
            """Return the tensor with memory in the place of one without."""
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
                for call in self._calls_for(tensor):
                    torch.default_generator.manual_seed(call.seed)
                    arguments, options = tree_map(filled, (call.args, call.kwargs))
                    result = call.function(*arguments, **options)
                    if call.made is not None:
                        pairs = zip(tree_leaves(call.made), tree_leaves(result), strict=True)
                        storages |= {memory_of(one): it.untyped_storage() for one, it in pairs}
                values: Tensor = filled(tensor.detach())
                return values
        finally:
            torch.default_generator.set_state(state)

    def _calls_for(self, tensor: Tensor) -> list[_RecordedCall]:
        """Return the calls on which a tensor depends, in their order."""
        needed = {memory_of(tensor)}
        calls = []
        for call in reversed(self._calls):
            if call.writes & needed:
                calls.append(call)
                is_new = call.writes if call.overwrites else frozenset()
                needed = (needed | call.reads) - is_new
        return calls[::-1]


class _SameDevice(TorchFunctionMode):
    """Lets tensors without memory seem to lie on the CPU.

    Of others torch skips some initializations, such as `trunc_normal_`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.__setitem__ and args[0].is_meta and isinstance(args[2], (int, float)):
            # torch would make a tensor of the number where no mode sees it.
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
        result = func(*args, **(kwargs or {}))
        if func == _IS_META:
            return False
        return _CPU if func == _DEVICE and result == _META else result


_recorders: list[_InitRecorder] = []


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules in this context whose parameters have no memory.

    Their initialization is run by `run.prepare`, layer by layer, on the CPU; or their values are
    read by `load_weights`. Buffers, and parameters that are made of values, such as
    `nn.Parameter(torch.zeros(8))`, are as always. Random numbers follow from the seed of
    `shoal.init`, or of `torch.manual_seed` before the context. They are the same under every
    strategy and on every number of ranks.

    Raises: UsageError: a parameter without memory is written into another tensor.
    """
    recorder = _InitRecorder(derive_seed(torch.initial_seed(), len(_recorders)))
    _recorders.append(recorder)
    with _SameDevice(), recorder:
        yield


def is_initialized_later(tensor: Tensor) -> bool:
    """Return True for a tensor without memory whose initialization was recorded."""
    return tensor.is_meta and _recorder_of(tensor) is not None


def initial_values(tensor: Tensor) -> Tensor:
    """Run the initialization of a tensor that `is_initialized_later`; return it on the CPU."""
    recorder = _recorder_of(tensor)
    assert recorder is not None
    return recorder.values(tensor)


def _recorder_of(tensor: Tensor) -> _InitRecorder | None:
    memory = memory_of(tensor)
    return next((recorder for recorder in _recorders if memory in recorder.known), None)


def _memories(tree: Any) -> frozenset[int]:
    """Return `memory_of` each tensor without memory."""
    leaves = tree_leaves(tree)
    return frozenset(
        memory_of(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta
    )


def _on_meta(tree: Any) -> Any:
    """Return arguments without memory, for kernels of the meta device take no others."""
    return tree_map(lambda leaf: leaf.to(_META) if isinstance(leaf, Tensor) else leaf, tree)


def _kept(leaf: Any) -> Any:
    """Return a copy of values, which may change until the call is run."""
    return leaf.clone() if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes into."""
    arguments = schema_of(func).arguments
    given = {each.name: arg for each, arg in zip(arguments, args, strict=False)} | options
    names = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
