"""Run each operator of a loop on two copies of its batch too: one equal, one with replaced rows.

    script     x                 x - x.mean(0)         x[perm]        what the loop computes
    same       x                 x - x.mean(0)         x[perm]        equal, or nothing is known
    replaced   x, other rows     x - x.mean(0)         x[perm]        tells what depends on what

The copies of a tensor's views are views of its copies, so writes in place are followed. Whatever
cannot be followed is forgotten, and counts as a constant from then on. A number that the script has
read by `item()` is found again by its value, unless the script has computed with it.

Random numbers that a loop draws by torch, before the step of a batch, are noted too:

z = torch.randn(len(x), 64)            each data rank draws other numbers, of the distribution of
run.forward_backward(..., x, z)        one device
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.tensor_digest import tensor_digest
from shoal.data.draws import DrawCall, draws_numbers
from shoal.platform.script_line import COMPILER, caller, calling_line, is_called_from
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
    base,
    memory_of,
    schema_of,
)
from shoal.trial.mixed_rows import layouts, lie_in_order, mixes_rows
from shoal.trial.reached import LARGEST_TABLE

MOST_OPERATORS = 3000
"""Operators on rows of the batch between two steps; a loop with more generates with a model."""
MOST_BYTES = 1 << 30
"""Memory of the copies on a CPU; on a GPU a quarter of what is free."""
MOST_TABLES = 64
"""Constants of a loss that are compared."""
MOST_PAIRS = 4
"""Matrices of pairs of samples that are held until the loss comes."""
_HIDDEN_WRITES = "batch_norm"
"""Operators that write into their arguments, and whose schemas do not say so."""


class _Memory(NamedTuple):
    """The copies of some memory of the script."""

    reference: Any
    """Weak reference to the storage, whose address may be used again once it is freed."""
    replaced_rows: Tensor
    """(samples,) bool, on the CPU."""
    views: dict[object, tuple[Tensor, Tensor]]
    """For each view of it that was seen: (the same rows, with replaced rows)."""


class ReplacedRows(DispatchMode):
    """Computes on copies of a batch what a script computes between `start` and `stop`.

    Attributes:
        draws: "randn at train.py:12" of each operator that has drawn, in order.
        own_draws: the same for a generator of the script, alike on all ranks -> sizes drawn.
        of_loss: the operators that run now compute a loss from the outputs of models.
        mixed_place: the line of a loss that takes targets, or other numbers without a gradient,
            which mix samples, or that selects samples by these; "" if none was seen.
        tables: (place, digest) of a loss's other constants: a bank of features, shares of classes.
        pairs: (place, numbers of pairs) where samples were compared with one another, such as
            `output @ targets.T`: (samples, samples, ...).
        figures: places where the script read a number that was computed from its samples.
        answers: place -> bools that the script read there: of its own rows, and of replaced rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[str, None] = {}
        self.own_draws: dict[str, tuple[int, ...]] = {}
        self.mixed_place = ""
        self._thread: int | None = None
        self._is_off = False
        self._operators = 0
        self.forget()

    def copy_rows(self, tensors: list[Tensor], replaced_rows: Tensor, donors: Tensor) -> None:
        """Copy tensors that have their samples along dimension 0, and replace some rows in a copy.

        Args:
            replaced_rows: (samples,) bool.
            donors: (samples,) int64: the row whose values stand in the place of each row.
        """
        self._operators = 0
        needed = 2 * sum(tensor.nbytes for tensor in tensors)
        if not tensors or needed > _most_bytes(tensors[0].device):
            return
        for tensor in filter(_is_plain, tensors):
            same, replaced = tensor.detach().clone(), tensor.detach().clone()
            replaced.copy_(tensor.detach()[donors.to(tensor.device)])
            memory = self._memory(tensor)
            if memory is not None and memory.replaced_rows is not replaced_rows:
                self._drop([tensor])  # an earlier batch is another view of the same data
            self._note(tensor, same, replaced, replaced_rows)

    def copies_of(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return (same, with replaced rows, which are replaced) for a tensor; None if unknown."""
        memory = self._memory(tensor)
        shown = None if memory is None else memory.views.get(_place(tensor))
        return None if memory is None or shown is None else (*shown, memory.replaced_rows)

    def start(self) -> None:
        """Follow the operators of this thread, unless a mode of the script does."""
        self._is_off = False
        if self._thread is None and not has_dispatch_modes() and self._known:
            self._thread = threading.get_ident()
            push_dispatch_mode(self)

    def stop(self) -> bool:
        """Follow no longer; return True if that was done. In another thread nothing is stopped."""
        if self._thread != threading.get_ident():
            return False
        # A call of what is compiled puts back that there is a mode, though it has gone.
        self._is_off = is_called_from(COMPILER, caller())
        if self._is_off:
            return True
        self._thread = None
        remove_dispatch_mode(self)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing inside: tensors computed there count as constants."""
        was_followed = self.stop()
        try:
            yield
        finally:
            if was_followed:
                self.start()

    def forget(self) -> None:
        """Forget all copies."""
        self.of_loss = False
        self.answers: dict[str, list[tuple[bool, bool]]] = {}
        self.figures: dict[str, None] = {}
        self.tables: list[tuple[str, int]] = []
        self.pairs: list[tuple[str, Tensor]] = []
        self._known: dict[int, _Memory] = {}
        # A number that the script has read -> the number of the copy with replaced rows.
        self._numbers: dict[float, float] = {}
        self._earlier: dict[int, Tensor] = {}

    def end_step(self) -> None:
        """Count tensors of the batches until now as constants: a queue of features is one."""
        self._earlier = {id(m.replaced_rows): m.replaced_rows for m in self._known.values()}
        self.pairs = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        frame = caller()
        self._note_draw(func, args, kwargs, frame)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [(t, memory) for t in given if (memory := self._memory(t)) is not None]
        if not known:
            return func(*args, **kwargs)
        if is_called_from(_COLLECTIVES, frame):  # what comes of them is of all ranks
            self._drop(_written(func, args, kwargs))
            return func(*args, **kwargs)
        self._operators += 1
        if func is READ_NUMBER:
            return self._note_number(given[0])
        rows = next((m for t, m in known if t.requires_grad), known[0][1]).replaced_rows
        if func.overloadpacket.__name__ in READING and self._is_table(args[0], rows, False):
            self._note_table(args[0], frame)
        if self.of_loss:
            self._look_at_constants(func, args, rows, frame)
            if _selects_rows(func, args, len(rows)):
                self._look_at_choice(args, rows, frame)
                return func(*args, **kwargs)
        if not self._can_follow(func, given, [memory.replaced_rows for _, memory in known], rows):
            self._drop(given)
            return func(*args, **kwargs)
        output = self._follow(func, args, kwargs, rows)
        if self.of_loss and torch.is_grad_enabled():
            self._look_at_pairs(output, rows, frame)
        return output

    def _can_follow(
        self, func: Any, given: list[Tensor], known: list[Tensor], rows: Tensor
    ) -> bool:
        return (
            func.namespace in ("aten", "torchvision")
            and _HIDDEN_WRITES not in schema_of(func).name
            and all(map(_is_plain, given))
            and all(each is rows or id(each) in self._earlier for each in known)
            and self._operators <= MOST_OPERATORS
        )

    def _follow(self, func: Any, args: Any, kwargs: Any, rows: Tensor) -> Any:
        written = _written(func, args, kwargs)
        for tensor in written:
            self._copy_constant(tensor, rows)
        shown = [self._arguments((args, kwargs), index, rows) for index in (0, 1)]
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
        if copies is not None and type(number) is bool:
            answers = self.answers.setdefault(calling_line(caller(2)), [])
            answers.append((number, READ_NUMBER(copies[1])))
        # Whole numbers are lengths and counts more often than means, and come again by chance.
        if copies is not None and type(number) is float and not number.is_integer():
            same, replaced = READ_NUMBER(copies[0]), READ_NUMBER(copies[1])
            if same == number and replaced != number:
                self._numbers[number] = replaced
                self.figures[calling_line(caller(2))] = None
        return number

    def _look_at_constants(self, func: Any, args: Any, rows: Tensor, frame: FrameType) -> None:
        """Note constants of a graph: the line of those computed from other samples, and tables."""
        graded = [t for t in _tensors(args) if t.requires_grad]
        if not (torch.is_grad_enabled() and graded):
            return
        beside = [self.copies_of(t) for t in graded if t.dim()]
        # Running statistics of a layer have a note of their own.
        has_tables = _HIDDEN_WRITES not in schema_of(func).name
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            is_of_classes = argument.name in ("weight", "pos_weight")
            is_factor = argument.name == "mat2" and self._has_rows(args[-2])
            for tensor in (t for t in _tensors(value) if _is_constant(t, func)):
                copies = self.copies_of(tensor)
                is_of_batch = copies is not None and id(copies[2]) not in self._earlier
                if copies and is_of_batch and _is_mixed(*copies, is_of_classes, beside):
                    self.mixed_place = self.mixed_place or calling_line(frame) or "the loss"
                elif has_tables and self._is_table(tensor, rows, is_factor):
                    self._note_table(tensor.double() if _is_count(tensor) else tensor, frame)

    def _is_table(self, tensor: Tensor, rows: Tensor, is_factor: bool) -> bool:
        """Return True for numbers that are those of no sample: statistics of the batch, or several
        numbers from elsewhere.

        Args: is_factor: of a matrix of samples, so none lies in it.
        """
        memory, copies = self._memory(tensor), self.copies_of(tensor)
        if memory is None or id(memory.replaced_rows) in self._earlier:
            return tensor.numel() > 1 and (is_factor or len(rows) not in tensor.shape[:2])
        return copies is not None and not (
            layouts(tensor, len(rows)) or torch.equal(copies[0], copies[1])
        )

    def _note_table(self, tensor: Tensor, frame: FrameType) -> None:
        """Note a float constant in which ranks should not differ, unless it is large."""
        if tensor.requires_grad:
            return
        is_small = 0 < tensor.numel() <= LARGEST_TABLE and len(self.tables) < MOST_TABLES
        if is_small and tensor.is_floating_point() and _is_plain(tensor):
            place = calling_line(frame) or "the loss"
            digest = int(tensor_digest(tensor))
            self.tables.append((f"{tuple(tensor.shape)} at {place}", digest))

    def _look_at_choice(self, args: Any, rows: Tensor, frame: FrameType) -> None:
        """Note the line of a choice of some samples by the numbers of all, as argsort()[:k] is."""
        chosen = _tensors(args[1:])[:1]
        copies = self.copies_of(chosen[0]) if chosen else None
        if copies is None or copies[2] is not rows or copies[0].dtype == torch.bool:
            return
        is_of_some = copies[0].dim() == 1 and len(copies[0]) < len(rows) == len(args[0])
        is_of_some &= copies[0].shape == copies[1].shape  # not those that a mask chooses
        if is_of_some and args[0].requires_grad and not torch.equal(copies[0], copies[1]):
            self.mixed_place = self.mixed_place or calling_line(frame) or "the loss"

    def _look_at_pairs(self, output: Any, rows: Tensor, frame: FrameType) -> None:
        """Hold numbers of which each is of two samples."""
        copies = self.copies_of(output) if isinstance(output, Tensor) else None
        if copies is None or len(self.pairs) == MOST_PAIRS:
            return
        is_square = output.shape[:2] == (len(rows), len(rows))
        if is_square and mixes_rows([copies[0]], [copies[1]], rows):
            self.pairs.append((calling_line(frame) or "the loss", output))

    def _has_rows(self, matrix: Tensor) -> bool:
        """Return True for a matrix with a sample in each row, so not in those of its factor."""
        copies = self.copies_of(matrix)
        if matrix.dim() != 2 or copies is None or copies[0].shape != copies[1].shape:
            return False
        return lie_in_order(*copies)

    def _note_draw(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> None:
        """Note an operator that draws.

        A loop that fetches ahead runs its data set meanwhile, whose numbers follow from the sample.
        """
        if not draws_numbers(func, args, kwargs) or is_called_from(_LOADERS, frame):
            return
        line = calling_line(frame)
        operator = schema_of(func).name.partition("::")[2].removesuffix("_")
        if not any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            self.draws |= {f"{operator} at {line}": None} if line else {}
        elif operator != "randperm":  # an order of the whole batch
            self.own_draws[f"{operator} at {line}"] = DrawCall.of(func, args, kwargs).shape

    def _arguments(self, arguments: Any, index: int, rows: Tensor) -> Any:
        def other(value: Any) -> Any:
            if isinstance(value, Tensor):
                copies = self.copies_of(value)
                return value if copies is None or copies[2] is not rows else copies[index]
            is_read = index and type(value) is float
            return self._numbers.get(value, value) if is_read else value

        return tree_map(other, arguments)

    def _save(self, output: Any, results: list[Any], rows: Tensor) -> None:
        for result, same, replaced in zip(_tensors(output), *map(_tensors, results), strict=True):
            is_new = self.copies_of(result) is None and _is_plain(result)
            if is_new and same.shape == result.shape:  # torch.unique may find more in other rows
                self._note(result, same, replaced, rows)
        if self._operators % 32 == 0:
            self._purge()

    def _note(self, tensor: Tensor, same: Tensor, replaced: Tensor, rows: Tensor) -> None:
        memory = self._memory(tensor)
        if memory is None:
            reference = MemoryWeakRef(tensor.untyped_storage())
            memory = _Memory(reference, rows, {})
            self._known[memory_of(tensor)] = memory
        memory.views[_place(tensor)] = same, replaced

    def _purge(self) -> None:
        """Forget memory that was freed; forget all where too much is left."""
        self._known = {k: m for k, m in self._known.items() if not m.reference.expired()}
        held = [same for m in self._known.values() for same, _ in [*m.views.values()][:1]]
        size_bytes = 2 * sum(same.untyped_storage().nbytes() for same in held)
        if held and size_bytes > _most_bytes(held[0].device):
            self._known.clear()

    def _copy_constant(self, tensor: Tensor, rows: Tensor) -> None:
        """Copy a constant that is to be written into, with the tensor of which it is a view."""
        copies = self.copies_of(tensor)
        if copies is not None and copies[2] is rows:
            return
        self._drop([tensor])  # what was known of another view, or of an earlier batch
        whole = base(tensor)
        whole = tensor if whole is None else whole
        clones = whole.detach().clone(), whole.detach().clone()
        begin = tensor.storage_offset() - whole.storage_offset()
        if clones[0].stride() == whole.stride():
            self._note(whole, *clones, rows)
            same, replaced = (c.as_strided(tensor.shape, tensor.stride(), begin) for c in clones)
        else:  # overlapping strides, as of expand or unfold
            same, replaced = tensor.detach().clone(), tensor.detach().clone()
        self._note(tensor, same, replaced, rows)

    def _memory(self, tensor: Tensor) -> _Memory | None:
        if not self._known or not _is_plain(tensor):
            return None
        memory = self._known.get(memory_of(tensor))
        if memory is not None and memory.reference.expired():
            del self._known[memory_of(tensor)]
            return None
        return memory

    def _drop(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if _is_plain(tensor):
                self._known.pop(memory_of(tensor), None)


def _place(tensor: Tensor) -> object:
    """Return what tells a view of some memory from other views of it."""
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor whose numbers lie in memory as its strides say."""
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # no class of its own rules
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


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


READING = ("index", "index_select")
"""Operators that take rows of their first argument, perhaps of a bank with the samples' numbers."""
SELECTING = ("index", "index_select", "masked_select", "nonzero")
"""Operators whose results may hold some rows, at other places than those of their samples."""


def _selects_rows(func: Any, args: Any, samples: int) -> bool:
    """Return True if an operator takes some of the rows, or some twice; False for an order."""
    name = func.overloadpacket.__name__
    if name not in SELECTING:
        return False
    if name == "nonzero" and args[0].shape == (samples, samples):
        return False  # pairs of samples, which are mixed
    chosen = _tensors(args[1:])
    if not chosen or chosen[0].dtype == torch.bool:
        return True
    order = chosen[0].flatten()
    is_order = torch.equal(order.sort().values, torch.arange(samples, device=order.device))
    return len(args[0]) == samples and not is_order


def _is_constant(tensor: Tensor, func: Any) -> bool:
    """Return True for numbers without a gradient, a mask, or counts that divide numbers."""
    is_value = tensor.is_floating_point() or tensor.dtype == torch.bool
    is_value |= func.overloadpacket.__name__ in ("div", "mul") and _is_count(tensor)
    return is_value and not tensor.requires_grad


def _is_count(tensor: Tensor) -> bool:
    """Return True for several whole numbers."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return is_whole and tensor.dtype != torch.bool and tensor.dim() > 0


def _is_mixed(
    same: Tensor,
    replaced: Tensor,
    rows: Tensor,
    is_of_classes: bool,
    beside: Sequence[tuple[Tensor, Tensor, Tensor] | None],
) -> bool:
    """Return True if rows were computed from other rows, or weights of classes from any.

    Args: beside: copies of what an operator takes beside them: which of equal rows, as a mask has
        them, belongs to a sample.
    """
    if same.dim() and len(same) == len(rows) and same.shape == replaced.shape:
        fellows = [c for c in beside if c and c[2] is rows and len(c[0]) == len(rows)]
        fellows = [c for c in fellows if c[0].shape == c[1].shape]
        columns = [same, *(c[0] for c in fellows)], [replaced, *(c[1] for c in fellows)]
        return mixes_rows(*columns, rows)
    return is_of_classes and same.dim() > 0 and not torch.equal(same, replaced)


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
_COLLECTIVES = f"{Path(__file__).parents[1] / 'comm'}/"
