"""Calls that ranks make on the backend "shoal" and on Gloo, with equal results."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.shm_backend.group import ShoalGroup

# What Gloo makes also on one host.
GLOOS = {"all_reduce_coalesced", "reduce", "gather", "scatter", "all_to_all_single", "messages"}
Plan = Sequence[tuple[str, int]]  # kind of call and a seed for all that is random in it
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8)
ANY = (*FLOATS, *WHOLE)  # what Gloo takes in all its calls
SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def compare(plan: Plan) -> int:
    """Make each call on both backends; return the number of calls that used shared memory."""
    # Every group there is: all ranks, and where there are more than two, the first ones and the
    # last ones.
    ranks = list(range(dist.get_world_size()))
    members = [ranks, ranks[:-1], ranks[1:]] if len(ranks) > 2 else [ranks]
    groups = [(m, dist.new_group(m), dist.new_group(m, backend="gloo")) for m in members]
    for kind, seed in plan:
        chance = random.Random(seed)
        which, ours, gloos = groups[chance.randrange(len(groups))]
        if dist.get_rank() not in which:
            continue
        state = chance.getrandbits(60)
        results = [CALLS[kind](group, which, random.Random(state)) for group in (ours, gloos)]
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
    group = groups[0][1]
    assert isinstance(group, ShoalGroup)
    return group._board.calls


def compare_each(times: int) -> dict[str, int]:
    """Compare each kind of call so many times; return the calls of each in shared memory."""
    return {kind: compare([(kind, seed) for seed in range(times)]) for kind in sorted(CALLS)}


def _length(chance: random.Random) -> int:
    return chance.choice((0, 1, 17, 1000, 70_000, 300_000))


def _tensor(chance: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor that is different on every rank."""
    made = torch.Generator().manual_seed(chance.getrandbits(40) + dist.get_rank())
    if dtype in (*FLOATS[:2], torch.complex64):
        return torch.randn(*shape, dtype=dtype, generator=made)
    return torch.randint(0, 5, shape, generator=made).to(
        dtype
    )  # what short floats hold too, added in any order


def _shape(chance: random.Random) -> tuple[int, ...]:
    length = _length(chance)
    return (length,) if chance.random() < 0.6 else (3, length)


def _call(chance: random.Random, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    if chance.random() < 0.5:
        function(*args, **kwargs)
        return
    work = function(*args, async_op=True, **kwargs)
    if work is not None:
        # Not all of Gloo's have one: a reduce-scatter, of bits in a group of ours, has none.
        has_future = function is not dist.reduce_scatter
        in_memory = getattr(kwargs["group"], "uses_shared_memory", False)
        if chance.random() < 0.5 and in_memory and has_future:
            work.get_future().wait()
        work.wait()


def _reduction(chance: random.Random) -> tuple[torch.dtype, Any]:
    dtype = chance.choice((*FLOATS, *WHOLE))
    names = ["SUM", "PRODUCT", "MIN", "MAX"] + (["AVG"] if dtype in FLOATS[:2] else [])
    if dtype in WHOLE:
        names += ["BAND", "BOR", "BXOR"]
    return dtype, getattr(dist.ReduceOp, chance.choice(names))


def all_reduce(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    dtype, op = _reduction(chance)
    tensor = _tensor(chance, dtype, *_shape(chance))
    _call(chance, dist.all_reduce, tensor, op, group=group)
    return [tensor]


def all_reduce_complex(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    tensor = _tensor(chance, torch.complex64, *_shape(chance))
    _call(chance, dist.all_reduce, tensor, group=group)
    return [tensor]


def all_reduce_coalesced(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    tensors = [_tensor(chance, torch.float64, *_shape(chance)) for _ in range(chance.randint(1, 3))]
    with dist.distributed_c10d._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


def broadcast(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    tensor = _tensor(chance, chance.choice(ANY), *_shape(chance))
    _call(chance, dist.broadcast, tensor, src=chance.choice(ranks), group=group)
    return [tensor]


def reduce(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    (dtype, op), root = _reduction(chance), chance.choice(ranks)
    tensor = _tensor(chance, dtype, *_shape(chance))
    _call(chance, dist.reduce, tensor, dst=root, op=op, group=group)
    return [tensor] if dist.get_rank() == root else []


def all_gather(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    tensor = _tensor(chance, chance.choice(ANY), *_shape(chance))
    rows = [torch.zeros_like(tensor) for _ in ranks]
    _call(chance, dist.all_gather, rows, tensor, group=group)
    return rows


def all_gather_single(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    tensor = _tensor(chance, chance.choice(ANY), *_shape(chance))
    whole = torch.zeros(len(ranks) * tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)
    _call(chance, SINGLE, whole, tensor, group=group)
    return [whole]


def gather(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    tensor, root = _tensor(chance, chance.choice(ANY), *_shape(chance)), chance.choice(ranks)
    rows = [torch.zeros_like(tensor) for _ in ranks] if dist.get_rank() == root else None
    _call(chance, dist.gather, tensor, rows, dst=root, group=group)
    return rows or []


def scatter(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    dtype, shape, root = chance.choice(ANY), _shape(chance), chance.choice(ranks)
    rows = [_tensor(chance, dtype, *shape) for _ in ranks]
    out = torch.zeros_like(rows[0])
    _call(
        chance, dist.scatter, out, rows if dist.get_rank() == root else None, src=root, group=group
    )
    return [out]


def reduce_scatter(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    (dtype, op), shape = _reduction(chance), _shape(chance)
    rows = [_tensor(chance, dtype, *shape) for _ in ranks]
    out = torch.zeros_like(rows[0])
    _call(chance, dist.reduce_scatter, out, rows, op, group=group)
    return [out]


def reduce_scatter_single(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    dtype = chance.choice(FLOATS[:2])
    op = chance.choice((dist.ReduceOp.SUM, dist.ReduceOp.AVG))
    rows = _tensor(chance, dtype, len(ranks), _length(chance))
    out = torch.zeros(1, rows.shape[1], dtype=dtype)
    _call(chance, SCATTER_SINGLE, out, rows, op, group=group)
    return [out]


def all_to_all_single(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    dtype, lengths, columns = chance.choice(ANY), _lengths(chance, ranks), chance.choice(((), (3,)))
    at = ranks.index(dist.get_rank())
    own, out_sizes = lengths[at], [each[at] for each in lengths]
    tensor = _tensor(chance, dtype, sum(own), *columns)
    out = torch.zeros(sum(out_sizes), *columns, dtype=dtype)
    _call(chance, dist.all_to_all_single, out, tensor, out_sizes, own, group=group)
    return [out]


def _lengths(chance: random.Random, ranks: list[int]) -> list[list[int]]:
    """Return the length that each rank sends to each rank."""
    return [[chance.choice((1, 5, 1000, 80_000)) for _ in ranks] for _ in ranks]


def messages(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    """Send around the ring, much of it before anything is received, and wait in any order."""
    at, shapes, dtype = (
        ranks.index(dist.get_rank()),
        [_shape(chance) for _ in range(3)],
        chance.choice(ANY),
    )
    received = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    waits = []
    for tag, into in enumerate(received):
        sent = _tensor(chance, dtype, *into.shape)
        if into.numel() or isinstance(group, ShoalGroup):  # Gloo cannot receive without bytes
            waits.append(dist.isend(sent, ranks[(at + 1) % len(ranks)], group, tag))
            waits.append(dist.irecv(into, ranks[at - 1], group, tag))
    chance.shuffle(waits)
    for work in waits:
        assert work is not None
        work.wait()
    return received


def barrier(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    _call(chance, dist.barrier, group=group)
    return []


def strided(group: Any, ranks: list[int], chance: random.Random) -> list[Tensor]:
    """Reduce and broadcast views with gaps. Gloo refuses them, so it gets a copy."""
    tensor = _tensor(chance, torch.float32, 40, 60)
    view = tensor.t()[3:, ::2]
    whole = view if isinstance(group, ShoalGroup) else view.contiguous()
    dist.all_reduce(whole, group=group)
    shown = torch.zeros(57, 40)[:, ::2] if isinstance(group, ShoalGroup) else torch.zeros(57, 20)
    dist.broadcast(shown.copy_(whole), src=ranks[0], group=group)
    return [whole, shown]


CALLS: dict[str, Callable[[Any, list[int], random.Random], list[Tensor]]] = {
    function.__name__: function
    for function in (
        *(all_reduce, all_reduce_complex, all_reduce_coalesced, broadcast, reduce, all_gather),
        *(all_gather_single, gather, scatter, reduce_scatter, reduce_scatter_single),
        *(all_to_all_single, messages, barrier, strided),
    )
}
