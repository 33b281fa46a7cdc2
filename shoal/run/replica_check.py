"""Silent corruption: ranks that hold the same weights compare digests of them.

      rank 0   digest of weights and optimizer state   91ab..  ┐
      rank 1                                           91ab..  ├ two against one: rank 2 is wrong
      rank 2                                           33f0..  ┘

Which ranks hold the same follows from how the strategy has divided the model: all ranks of ddp, the
ranks of a data axis beside tensor and pipeline. Two replicas only tell that one of them is wrong.
Shards of zero have no replica, except under hybrid. A changed bit is found at the next check, and
gradients that its rank has sent until then were computed with it, so no rank's weights are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.comm.tensor_digest import tensor_digest
from shoal.errors import ReplicasDiffer
from shoal.platform.torch_private.subclasses import is_made_of_tensors
from shoal.run.optimizer_binding import listed
from shoal.strategies.base import LocalModel
from shoal.strategies.grad_checks import read


class Replicated(NamedTuple):
    """A tensor of this rank that other ranks hold too.

    Attributes:
        name: of a parameter; of its optimizer state, `parameter (key)`.
        part: the part of the model that it belongs to; ranks with the same part hold the same.
    """

    name: str
    part: str
    value: Tensor


def check_replicas(local_model: LocalModel, optimizers: Sequence[Optimizer], mesh: Mesh) -> None:
    """Compare what replicas hold. Collective. Ranks must hold the weights of the same step.

    Raises: ReplicasDiffer: on every rank.
    """
    if mesh.size == 1 or not local_model.strategy_state.is_synchronous:
        return
    differences = find_differences(replicated_tensors(local_model, optimizers, mesh), mesh)
    if not differences:
        return
    names = listed([*differences], 3)
    most, *others = sorted(next(iter(differences.values())), key=len, reverse=True)
    wrong = sorted(rank for ranks in others for rank in ranks)
    if len(most) > len(wrong):
        fact = f"{_spelled(wrong)} other bits than {len(most)} other ranks in {names}"
        who = "memory or a computation is faulty there"
    else:
        ranks = _spelled(sorted((*most, *wrong)), "should hold")
        fact = f"{ranks} the same bits, and differ in {names}"
        who = (
            "memory or a computation is faulty on one of them. With three replicas or more the "
            "majority would tell which"
        )
    raise ReplicasDiffer(
        f"{fact}: {who}. Nothing is saved, for what was sent since was computed with wrong bits; "
        "start again from the last checkpoint, on other hardware if it happens again."
    )


def _spelled(ranks: Sequence[int], verb: str = "") -> str:
    many = len(ranks) > 1
    return (
        f"rank{'s' * many} {' and '.join(map(str, ranks))} {verb or ('hold' if many else 'holds')}"
    )


def find_differences(held: Sequence[Replicated], axis: Axis) -> dict[str, list[list[int]]]:
    """Return for each tensor in which ranks differ those with equal bits together. Collective.

    It is the same on every rank.
    """
    found = read([tensor_digest(entry.value) for entry in held])
    parts: dict[str, list[complex]] = {}
    for entry, digest in zip(held, found, strict=True):
        parts.setdefault(entry.part, []).append(digest)
    summary = {p: sha256(repr(of_part).encode()).hexdigest() for p, of_part in parts.items()}
    seen: dict[str, str] = {}
    told = [pair for of_rank in axis.all_gather_json(summary) for pair in of_rank.items()]
    if all(seen.setdefault(part, value) == value for part, value in told):
        return {}
    mine = {f"{e.part}|{e.name}": digest for e, digest in zip(held, found, strict=True)}
    by_key: dict[str, dict[Any, list[int]]] = {}
    for rank, digests_of_rank in enumerate(axis.all_gather_json(mine)):
        for key, digest in digests_of_rank.items():
            by_key.setdefault(key, {}).setdefault(digest, []).append(rank)
    differing: dict[str, list[list[int]]] = {}
    for key, by_digest in by_key.items():
        if len(by_digest) > 1:  # the first one of several shards that differ
            differing.setdefault(key.partition("|")[2], [*by_digest.values()])
    return differing


def replicated_tensors(
    local_model: LocalModel, optimizers: Sequence[Optimizer], mesh: Mesh
) -> list[Replicated]:
    """Return parameters and optimizer state of this rank, with the part of the model of each."""
    stage = f"stage {mesh.pipeline.rank}" if local_model.is_partial else ""
    tensors = []
    for name, parameter in local_model.module.named_parameters():
        if not parameter.is_meta and to_local(parameter).numel():
            tensors.append(Replicated(name, stage + _shard_of(parameter), parameter.detach()))
    state_of = {p: state for o in optimizers for p, state in o.state.items()}
    for name, parameter in local_model.trainable_params.items():
        for key, value in state_of.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel():
                part = stage + _shard_of(parameter)
                tensors += [
                    Replicated(f"{name} ({key})", part + at, piece)
                    for at, piece in _plain_parts(value.detach())
                ]
    return tensors


def _plain_parts(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that a tensor consists of, such as codes and scales of 8 bits."""
    local: Any = to_local(value)
    if not is_made_of_tensors(local):
        yield "", local
        return
    for name in local.__tensor_flatten__()[0]:
        for at, part in _plain_parts(getattr(local, name)):
            yield f" {name}{at}", part


def _shard_of(tensor: Tensor) -> str:
    """Return which shard of a DTensor this rank holds; empty for a whole tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return "".join(
        f" {name} {mesh.get_local_rank(index)}"
        for index, (name, placement) in enumerate(zip(names, tensor.placements, strict=True))
        if not isinstance(placement, Replicate)
    )
