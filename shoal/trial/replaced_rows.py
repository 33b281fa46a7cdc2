"""Operators run on two copies of a batch besides: the same rows, and some rows replaced by others.

    script     x                 x - x.mean(0)         x[perm]        what the loop computes
    same       x                 x - x.mean(0)         x[perm]        equal, or nothing is known
    replaced   x, other rows     x - x.mean(0)         x[perm]        tells what depends on what

The copies lie beside the memory of the script's tensors, so views and writes in place are followed.
Whatever cannot be followed is forgotten, and counts as a constant from then on. A number that the
script has read from a tensor is known by its digits where it is used, unless it was computed with.

Random numbers that a loop draws by torch between a batch's coming and its step.

z = torch.randn(len(x), 64)            each data rank draws others: the law of one device, and
run.forward_backward(..., x, z)        not its numbers
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.data.draws import draws_numbers
from shoal.platform.script_line import caller, calling_line
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import (
    DispatchMode,
    has_dispatch_modes,
    push_dispatch_mode,
    remove_dispatch_mode,
)
from shoal.platform.torch_private.tensor_state import (
    READ_NUMBER,
    MemoryWeakRef,
    memory_of,
    schema_of,
)

MOST_OPERATORS = 3000
"""Operators on rows of the batch between two steps; a loop with more generates with a model."""
MOST_BYTES = 1 << 30
"""Memory of the copies on a CPU; on a GPU a quarter of what is free."""
_HIDDEN_WRITES = "batch_norm"
"""Operators that write into their arguments, and whose schemas do not say so."""


class _Copies(NamedTuple):
    """The copies of some memory, as bytes (n,) uint8."""

    memory: Any
    """A weak reference; the number of a memory may be used again after it."""
    begin: int
    """Its first byte that was copied."""
    same: Tensor
    replaced: Tensor
    replaced_rows: Tensor
    """(samples,) bool, on the CPU."""


class ReplacedRows(DispatchMode):
    """Computes on copies of a batch what a script computes between `start` and `stop`.

    Attributes:
        draws: which random numbers it draws by torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = LoopDraws()
        self._copies: dict[int, _Copies] = {}
        # A number that the script has read -> the number of the copy with replaced rows.
        self._numbers: dict[float, float] = {}
        self._thread: int | None = None
        self._operators = 0

    def copy_rows(self, tensors: list[Tensor], replaced_rows: Tensor, donors: Tensor) -> None:
        """Copy tensors that have their samples along dimension 0, and replace some rows in a copy.

        Args:
            replaced_rows: (samples,) bool.
            donors: (samples,) int64: the row whose values stand in the place of each row.
        """
        self._operators = 0
        ranges: dict[int, tuple[int, int, Tensor]] = {}
        for tensor in tensors:
            begin, end = _range_of(tensor)
            key = memory_of(tensor)
            if key in ranges:
                begin, end = min(begin, ranges[key][0]), max(end, ranges[key][1])
            ranges[key] = begin, end, tensor
        needed = 2 * sum(end - begin for begin, end, _ in ranges.values())
        if not tensors or needed > _most_bytes(tensors[0].device):
            return
        for key, (begin, end, tensor) in ranges.items():
            memory = tensor.untyped_storage()
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            data.set_(memory, begin, (end - begin,), (1,))
            reference = MemoryWeakRef(memory)
            self._copies[key] = _Copies(reference, begin, data.clone(), data.clone(), replaced_rows)
        for tensor in tensors:
            copies = self.copies_of(tensor)
            if copies is not None:
                copies[1].copy_(tensor.detach()[donors.to(tensor.device)])

    def copies_of(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return (same, with replaced rows, which are replaced) for a tensor; None if unknown."""
        copies = self._find(tensor)
        if copies is None:
            return None
        shown = [_shown(data, copies.begin, tensor) for data in (copies.same, copies.replaced)]
        if shown[0] is None or shown[1] is None:
            return None
        return shown[0], shown[1], copies.replaced_rows

    def start(self) -> None:
        """Follow the operators of this thread, unless a mode of the script does."""
        if self._thread is None and not has_dispatch_modes() and self._copies:
            self._thread = threading.get_ident()
            push_dispatch_mode(self)

    def stop(self) -> bool:
        """Follow no longer; return True if that was done. In another thread nothing is stopped."""
        if self._thread != threading.get_ident():
            return False
        self._thread = None
        remove_dispatch_mode(self)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take what is computed inside for constants."""
        was_followed = self.stop()
        try:
            yield
        finally:
            if was_followed:
                self.start()

    def forget(self) -> None:
        """Forget all copies."""
        self._copies.clear()
        self._numbers.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws.see(func, args, kwargs, caller())
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [copies for copies in map(self._find, given) if copies is not None]
        if not known:
            return func(*args, **kwargs)
        self._operators += 1
        if func is READ_NUMBER:
            return self._note_number(given[0])
        rows = known[0].replaced_rows
        can_follow = (
            func.namespace in ("aten", "torchvision")
            and _HIDDEN_WRITES not in schema_of(func).name
            and all(map(_is_plain, given))
            and all(copies.replaced_rows is rows for copies in known)
            and self._operators <= MOST_OPERATORS
        )
        if not can_follow:
            self._drop(given)
            return func(*args, **kwargs)
        return self._follow(func, args, kwargs, rows)

    def _follow(self, func: Any, args: Any, kwargs: Any, rows: Tensor) -> Any:
        written = _written(func, args, kwargs)
        for tensor in written:
            self._copy(tensor, rows)
        shown = [self._arguments((args, kwargs), index) for index in (0, 1)]
        generators = _generators(func, args, kwargs)
        before = [generator.get_state() for generator in generators]
        output = func(*args, **kwargs)
        after = [generator.get_state() for generator in generators]
        try:
            results = []
            for others, options in shown:
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)
                results.append(func(*others, **options))
            self._save(output, results, rows)
        except Exception:  # noqa: BLE001 (replaced rows may fit nowhere; the script must go on)
            self._drop([*written, *_tensors(output)])
        finally:
            for generator, state in zip(generators, after, strict=True):
                generator.set_state(state)
        return output

    def _note_number(self, tensor: Tensor) -> Any:
        number = READ_NUMBER(tensor)
        copies = self.copies_of(tensor)
        # Whole numbers are lengths and counts more often than means, and come again by chance.
        if copies is not None and type(number) is float and not number.is_integer():
            same, replaced = READ_NUMBER(copies[0]), READ_NUMBER(copies[1])
            if same == number and replaced != number:
                self._numbers[number] = replaced
        return number

    def _arguments(self, arguments: Any, index: int) -> Any:
        def other(value: Any) -> Any:
            if isinstance(value, Tensor):
                copies = self.copies_of(value)
                return value if copies is None else copies[index]
            is_read = index and type(value) is float
            return self._numbers.get(value, value) if is_read else value

        return tree_map(other, arguments)

    def _save(self, output: Any, results: list[Any], rows: Tensor) -> None:
        outputs = _tensors(output)
        for result, *others in zip(outputs, *map(_tensors, results), strict=True):
            if self._find(result) is not None:
                continue  # a view, or written in place
            same, replaced = others
            if not _is_plain(result) or any(
                other.shape != result.shape or other.stride() != result.stride() for other in others
            ):
                continue
            memory = result.untyped_storage()
            begin, end = _range_of(result)
            if _range_of(same) != (begin, end) or _range_of(replaced) != (begin, end):
                continue
            self._copies[memory_of(result)] = _Copies(
                MemoryWeakRef(memory), begin, _bytes_of(same), _bytes_of(replaced), rows
            )
        if self._operators % 32 == 0:
            self._purge()

    def _purge(self) -> None:
        """Forget memory that was freed; forget all where too much is left."""
        self._copies = {k: c for k, c in self._copies.items() if not c.memory.expired()}
        copies = list(self._copies.values())
        if copies and 2 * sum(c.same.numel() for c in copies) > _most_bytes(copies[0].same.device):
            self._copies.clear()

    def _copy(self, tensor: Tensor, rows: Tensor) -> None:
        """Copy a constant that is to be written into."""
        if self._find(tensor) is None:
            memory = tensor.untyped_storage()
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            data.set_(memory, 0, (memory.nbytes(),), (1,))
            self._copies[memory_of(tensor)] = _Copies(
                MemoryWeakRef(memory), 0, data.clone(), data.clone(), rows
            )

    def _find(self, tensor: Tensor) -> _Copies | None:
        if not self._copies or not _is_plain(tensor):
            return None
        copies = self._copies.get(memory_of(tensor))
        if copies is not None and copies.memory.expired():
            del self._copies[memory_of(tensor)]
            return None
        return copies

    def _drop(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if _is_plain(tensor):
                self._copies.pop(memory_of(tensor), None)


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor whose numbers lie in memory as its strides say."""
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # no class of its own rules
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the one after its last."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (1 + sum((n - 1) * int(step) for n, step in steps)) * size


def _bytes_of(tensor: Tensor) -> Tensor:
    begin, end = _range_of(tensor)
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return data.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


def _shown(data: Tensor, begin: int, tensor: Tensor) -> Tensor | None:
    """Return the bytes of a copy as `tensor` shows its memory; None if they are not all there."""
    first, end = _range_of(tensor)
    if first < begin or end > begin + data.numel():
        return None
    start = first - begin + int(data.storage_offset())
    offset, rest = divmod(start, tensor.element_size())
    if rest:
        return None
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(data.untyped_storage(), offset, tensor.shape, tensor.stride())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors into which this call of an operator writes."""
    written: list[Tensor] = []
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [tensor for tensor in _tensors(value) if _is_plain(tensor)]
    return written


def _generators(func: Any, args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the generators from which this call of an operator draws."""
    if not draws_numbers(func, args, kwargs):
        return []
    given = [g for g in (*args, *kwargs.values()) if isinstance(g, torch.Generator)]
    if given:
        return given
    devices = {tensor.device for tensor in _tensors((args, kwargs))}
    found = [torch.cuda.default_generators[d.index] for d in devices if d.type == "cuda"]
    return [*found, torch.default_generator]


def _most_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return MOST_BYTES


_LOADERS = f"{Path(__file__).parents[1] / 'data'}/"


class LoopDraws:
    """Notes which operators draw, and where.

    Attributes: places: "randn at train.py:12", each once, in order.
    """

    def __init__(self) -> None:
        self.places: dict[str, None] = {}

    def see(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> None:
        """Note an operator that draws from a generator of torch's own.

        A loop that fetches ahead runs its data set meanwhile, whose numbers follow from the sample.
        """
        given = any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
        if given or not draws_numbers(func, args, kwargs) or _is_of_loader(frame):
            return
        line = calling_line(frame)
        if line:
            operator = schema_of(func).name.partition("::")[2].removesuffix("_")
            self.places[f"{operator} at {line}"] = None


def _is_of_loader(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LOADERS):
            return True
        frame = frame.f_back
    return False
