"""Random numbers of the global batch: every rank draws for all rows, and keeps its own.

      one device   draws   [ row 0  row 1  row 2  row 3  row 4 ]
      rank 0       draws   [ row 0  row 1  row 2  row 3  row 4 ]   and keeps rows 0 1 2
      rank 1       draws   [ row 0  row 1  row 2  row 3  row 4 ]   and keeps rows 3 4

So the random generators of all ranks stay equal, and dropout, noise and random time steps are those
of one device, whatever the shares are. The price is time: each rank draws as many numbers as one
device, and Python looks at every operator.

A tensor has the rows of the batch in dim 0, or in dim 1 (time first), or in a dim 0 that is a
multiple of them (one row for each token). Any other tensor is drawn whole, the same on all ranks.
Ranks that take a tensor differently have another `GlobalDraws.digest` afterwards.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.platform.torch_private.subclasses import DispatchMode
from shoal.platform.torch_private.tensor_state import schema_of

ROWWISE = frozenset(
    ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal")
    + ("native_dropout", "normal_functional", "rand", "rand_like", "randint", "randint_like")
    + ("randn", "randn_like", "random", "uniform")
)
"""Operators whose numbers for one row do not depend on the values in other rows.

They take equally many numbers from the generator for every row.
"""
FILLING_FUNCTIONS = frozenset(
    ("randn_like", "rand_like", "randint_like", "normal_", "uniform_", "bernoulli_")
    + ("exponential_", "random_", "log_normal_", "cauchy_", "geometric_")
)
"""Functions of torch that draw a number for each one of a tensor, whatever its values are."""
COUPLING = frozenset({"randperm", "multinomial"})
"""Operators that may draw one row by looking at others."""


class Rows(NamedTuple):
    """The rows that this rank computes, of those of the global batch."""

    first: int
    """Index of the first row within the global batch."""
    size: int
    """At least 1: a stand-in is row 0 of the global batch."""
    total: int
    """Rows of the global batch."""


class GlobalDraws(DispatchMode):
    """Inside, random tensors are drawn for the global batch, and cut to the rows of this rank.

    All ranks must enter with equal random generators.

    Args: rows: the rows that are computed.

    Attributes: digest: 32 bits that tell apart which tensors were drawn for the global batch.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.begin(rows)

    def begin(self, rows: Rows) -> None:
        """Draw for these rows from now on: those of a micro-batch."""
        self.rows = rows
        self.digest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not is_random(func):
            return func(*args, **options)
        call = DrawCall.of(func, args, options)
        window = None if call.is_certain else own_part(call.shape, self.rows)
        if window is None:
            return func(*args, **options)
        shape = (*call.shape[: window.dim], window.total, *call.shape[window.dim + 1 :])
        self.digest = zlib.crc32(f"{call.name} {shape}".encode(), self.digest)
        if self.rows.size == self.rows.total:
            return func(*args, **options)
        if call.name not in ROWWISE or (call.name in COUPLING and len(call.shape) == 1):
            raise UsageError(_refusal(call, self.rows))
        return _draw(func, call, window, shape, args, options)


def is_random(func: Any) -> bool:
    """Return True for an operator that takes numbers from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def draws_numbers(func: Any, args: Any, options: Any) -> bool:
    """Return True if this call of an operator draws: dropout of probability 0 does not."""
    return is_random(func) and not DrawCall.of(func, args, options).is_certain


def digest_of_generators(device: torch.device, digest: int = 0) -> int:
    """Return 32 bits that tell states of the random generators apart, of the CPU and `device`.

    Args: digest: bits of something else, to be told apart too.
    """
    digest = zlib.crc32(torch.get_rng_state().numpy().tobytes(), digest)
    if device.type == "cuda":
        digest = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), digest)
    return digest


class DrawCall(NamedTuple):
    """One call of a random operator."""

    name: str
    """Name without the namespace, the underscore of in-place operators, and the overload."""
    shape: tuple[int, ...]
    """Shape of what is drawn, by the arguments."""
    is_certain: bool
    """Nothing is drawn: the probability is 0, or it is no training."""

    @classmethod
    def of(cls, func: Any, args: Any, options: Any) -> DrawCall:
        arguments = schema_of(func).arguments
        given = {a.name: value for a, value in zip(arguments, args, strict=False)} | dict(options)
        tensors = [value.shape for value in given.values() if isinstance(value, Tensor)]
        if "size" in given:
            shape = tuple(given["size"])
        elif "n" in given and not tensors:  # randperm
            shape = (int(given["n"]),)
        elif "mean" in given and "std" in given:
            shape = tuple(torch.broadcast_shapes(*tensors)) if tensors else ()
        else:
            shape = tuple(tensors[0]) if tensors else ()
        name = schema_of(func).name.partition("::")[2].removesuffix("_")
        # Fused attention and recurrent layers draw only for their dropout.
        omitted = {a.name: a.default_value for a in arguments if a.has_default_value()}
        p = (omitted | given).get("dropout_p", given.get("dropout"))
        is_certain = p in (0, 0.0) or given.get("train", True) in (False, None)
        if name == "native_dropout":
            is_certain = is_certain or given["p"] == 0
        if name == "rrelu_with_noise":
            is_certain = not given.get("training", False)
        return cls(name, shape, is_certain)


class OwnPart(NamedTuple):
    """The place of this rank's rows in a tensor of the global batch."""

    dim: int
    start: int
    length: int
    total: int


def own_part(shape: Sequence[int], rows: Rows) -> OwnPart | None:
    """Return where the rows of a tensor of this shape lie; None if it has no rows."""
    if not shape:
        return None
    if len(shape) > 1 and shape[0] != rows.size and shape[1] == rows.size:
        return OwnPart(1, rows.first, rows.size, rows.total)
    each, rest = divmod(shape[0], rows.size)
    if rest or not each:
        return None
    return OwnPart(0, each * rows.first, each * rows.size, each * rows.total)


def _draw(
    func: Any, call: DrawCall, window: OwnPart, shape: tuple[int, ...], args: Any, options: Any
) -> Any:
    """Call `func` for the global batch, and return or write this rank's rows.

    Args: shape: that of the global batch.
    """
    if "out" in options:
        raise UsageError(
            f'draws="global": {call.name} with out= cannot draw for the global batch. Use its '
            "result instead."
        )

    def enlarge(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _enlarged(value, call.shape, window)
        is_size = isinstance(value, (tuple, list)) and tuple(value) == call.shape
        return shape if is_size else value

    drawn = func(*map(enlarge, args), **{name: enlarge(value) for name, value in options.items()})
    if call.name == "native_dropout":
        x, p = args[0], args[1]
        mask = _own_rows(drawn[1], window)
        return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
    own = _own_rows(drawn, window)
    is_in_place = schema_of(func).name.endswith("_")
    # A clone: a view would keep the numbers of all rows until the backward pass.
    return args[0].copy_(own) if is_in_place else own


def _own_rows(drawn: Tensor, window: OwnPart) -> Tensor:
    return drawn.narrow(window.dim, window.start, window.length).clone()


def _enlarged(value: Tensor, shape: tuple[int, ...], window: OwnPart) -> Tensor:
    """Return a tensor like `value` with the rows of all ranks; those of others have any value.

    The order of dims in memory stays, because numbers are drawn in that order.
    """
    dim = window.dim - (len(shape) - value.dim())
    if dim < 0 or value.shape[dim] != shape[window.dim]:
        return value
    sizes = list(value.shape)
    sizes[dim] = window.total
    order = list(range(value.dim()))
    if not value.is_contiguous():
        order.sort(key=lambda d: -value.stride()[d])
    # A half is a valid probability, weight and deviation.
    whole = value.new_full([sizes[d] for d in order], 0.5)
    whole = whole.permute([order.index(d) for d in range(value.dim())])
    whole.narrow(dim, window.start, window.length).copy_(value)
    return whole


def _refusal(call: DrawCall, rows: Rows) -> str:
    if call.name in COUPLING:
        return (
            f'draws="global": {call.name} over the {rows.size} samples of this rank couples them, '
            f"and one device draws over all {rows.total}. Draw for each sample by itself, or use "
            'draws="rank".'
        )
    return (
        f'draws="global": {call.name} of shape {call.shape} draws in an order that depends on the '
        "values, or inside of one kernel, so nobody can draw for all ranks. Use another function "
        '(for attention: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)), or draws="rank".'
    )
