"""The random numbers of a whole batch, handed to its parts row by row.

    whole    dropout draws a mask of (12, 8)         recorded
    part     rows 3, 7, 1: dropout draws (3, 8)      replaced by rows 3, 7, 1 of the recorded mask

So a difference between parts and whole is no matter of luck. A permutation of the rows is no draw
of rows: it is drawn anew, and what it mixes shows.

`shoal/data/draws.py` cuts draws of the whole too, but draws the whole again on each rank and keeps
neighbouring rows of it. A part has any rows, in any order, and the whole was computed before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.data.draws import Rows, draws_numbers, own_part
from shoal.platform.torch_private.subclasses import DispatchMode
from shoal.shm_backend.torch_calls import refusals
from shoal.trial.loss_verdict import CannotTry

_HALF = (torch.float16, torch.bfloat16)
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
COMMUNICATES = "communication between ranks"


class RecordedDraws:
    """The draws of a whole batch, in their order.

    Attributes:
        num_rows: samples of the whole.
        values: (operator, what it drew).
        in_blocks: k draws of each row lie n apart, as for torch.cat of two views of a batch; False:
            they are neighbours.
        repeats_rows: there are draws for which `in_blocks` makes a difference.
        uncut: a draw that has no rows of its own, in words; empty if there is none.
        half: an operator computed in 16 bits.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.in_blocks = False
        self.repeats_rows = False
        self.uncut = ""
        self.half = False
        self.values: list[tuple[str, Tensor]] = []
        # Index of a draw -> its dimensions of rows, as the parts have shown.
        self._row_dims: dict[int, list[int]] = {}

    def share(self, index: int, operator: str, drawn: Tensor, rows: Tensor) -> Tensor | None:
        """Return what a part is to use in place of `drawn`; None if draws cannot be told apart."""
        if index >= len(self.values) or self.values[index][0] != operator:
            return self._refused(operator)
        whole = self.values[index][1]
        if whole.dim() != drawn.dim() or whole.dtype != drawn.dtype:
            return self._refused(operator)
        if len(rows) < self.num_rows:
            dims = [d for d in range(whole.dim()) if whole.shape[d] != drawn.shape[d]]
            self._row_dims.setdefault(index, dims)
        # A permutation of all rows changes no shape: the parts before it have shown the rows.
        dims = self._row_dims.get(index, [])
        for d in dims:
            chosen = self._rows_along(whole.shape[d], rows)
            if chosen is None:
                return self._refused(operator)
            whole = whole.index_select(d, chosen.to(whole.device))
        return whole if whole.shape == drawn.shape else self._refused(operator)

    def misplaced(self, sizes: Iterable[int]) -> str:
        """Return which draw has its rows elsewhere than its shape says, with the cure, or "".

        `draws="global"` goes by the shape alone.

        Args: sizes: samples that a rank computes at once.
        """
        for (index, dims), rows in product(self._row_dims.items(), sizes):
            operator, whole = self.values[index]
            shape = tuple(
                length * rows // self.num_rows if dim in dims else length
                for dim, length in enumerate(whole.shape)
            )
            part = own_part(shape, Rows(0, rows, 2 * rows))
            guess = [] if part is None else [part.dim]
            if not _are_same(shape, guess, dims):
                why = (
                    f"its samples are in {_dims_in_words(dims)}, and its shape says {rows} samples "
                    f"in {_dims_in_words(guess)}. Choose another batch size"
                )
            elif dims and self.in_blocks and whole.shape[dims[0]] > self.num_rows:
                why = (
                    "it has its samples in several blocks, as torch.cat of two views makes them. "
                    "Call the model once for each of them"
                )
            elif rows == 1 and not whole.is_contiguous():
                why = (
                    "one sample does not tell in which order it lies in memory. Use larger batches"
                )
            else:
                continue
            return (
                f'draws="global": {operator} draws a tensor of shape {shape} in compute_loss; '
                f'{why}, or draws="rank", which draws other numbers from the same distribution.'
            )
        return ""

    def _rows_along(self, length: int, rows: Tensor) -> Tensor | None:
        if length % self.num_rows:
            return None
        per_row = length // self.num_rows
        self.repeats_rows |= per_row > 1
        repeats = torch.arange(per_row)
        if self.in_blocks:
            return (repeats[:, None] * self.num_rows + rows).flatten()
        return (rows[:, None] * per_row + repeats).flatten()

    def _refused(self, operator: str) -> Tensor | None:
        self.uncut = self.uncut or operator
        return None


def _are_same(shape: tuple[int, ...], guess: list[int], dims: list[int]) -> bool:
    """Return True if rows in either dimensions are the same numbers in memory."""
    if len(guess) != 1 or len(dims) != 1:
        return guess == dims
    low, high = sorted((*guess, *dims))
    return low == high or set(shape[low : high + 1]) == {1}


def _dims_in_words(dims: list[int]) -> str:
    return f"dimension {' and '.join(map(str, dims))}" if dims else "no dimension"


class DrawnInParts(DispatchMode):
    """Record the draws of the whole (`rows` None), or replace those of a part.

    Raises: CannotTry: inside of it a collective is called, or a sharded tensor is used.
    """

    def __init__(self, draws: RecordedDraws, rows: Tensor | None) -> None:
        super().__init__()
        self._draws, self._rows, self._next = draws, rows, 0

    def __enter__(self) -> DrawnInParts:
        refusals.append(CannotTry(COMMUNICATES))  # of groups that the dispatcher does not know
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        refusals.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _COLLECTIVES or any(issubclass(kind, DTensor) for kind in types):
            raise CannotTry(COMMUNICATES)
        options = kwargs or {}
        if not draws_numbers(func, args, options):
            result = func(*args, **options)
            if isinstance(result, Tensor) and result.dtype in _HALF:
                self._draws.half = True
            return result
        return self._draw(func, args, options)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        operator = str(func.overloadpacket).removeprefix("aten.")
        if operator == "native_dropout":
            return self._dropout(func, args, kwargs)
        result = func(*args, **kwargs)
        if operator == "randperm":
            return result
        if not isinstance(result, Tensor):  # fused attention and recurrent layers
            self._draws.uncut = self._draws.uncut or operator
            return result
        share = self._share(operator, result)
        return result if share is None else result.copy_(share)

    def _dropout(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Dropout as one kernel: its mask is the draw, and the output follows from it."""
        output, mask = func(*args, **kwargs)
        share = self._share("native_dropout", mask)
        if share is not None:
            keep = 1.0 - args[1]
            output.copy_(args[0] * share * (1.0 / keep if keep else 0.0))
            mask.copy_(share)
        return output, mask

    def _share(self, operator: str, drawn: Tensor) -> Tensor | None:
        if self._rows is None:
            self._draws.values.append((operator, drawn.detach().clone()))
            return None
        self._next += 1
        return self._draws.share(self._next - 1, operator, drawn, self._rows)

    def finish(self) -> None:
        """Note a part that has drawn less often than the whole. Called after the part."""
        if self._rows is not None and self._next != len(self._draws.values):
            self._draws.uncut = self._draws.uncut or "another number of draws"
