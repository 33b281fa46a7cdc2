"""Silent corruption: ranks that hold the same weights compare digests of them.

      rank 0   digest of weights and optimizer state   91ab..  ┐
      rank 1                                           91ab..  ├ two against one: rank 2 is wrong,
      rank 2                                           33f0..  ┘ and gets the tensors of rank 0

Which ranks hold the same follows from how the strategy has divided the model: all ranks of ddp, the
ranks of a data axis beside tensor and pipeline. Two replicas only tell that one of them is wrong.
Shards of zero have no replica, except under hybrid. A changed bit is found at the next check, and
gradients that its rank has sent until then were computed with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.errors import ReplicasDiffer
from shoal.platform.torch_private.subclasses import is_made_of_tensors
from shoal.run.tensor_digest import as_bytes, tensor_digest
from shoal.strategies.base import LocalModel

TOLD_NAMES = 3


class Replicated(NamedTuple):
    """A tensor of this rank that other ranks hold too.

    Attributes:
        name: of a parameter; of its optimizer state, `parameter (key)`.
        part: the part of the model that it belongs to; ranks with the same part hold the same.
    """

    name: str
    part: str
    value: Tensor


class Difference(NamedTuple):
    """A tensor in which replicas differ.

    Attributes:
        wrong: ranks that hold another value than the majority.
        right: ranks of the majority; empty if there is none.
    """

    name: str
    part: str
    wrong: tuple[int, ...]
    right: tuple[int, ...]


def check_replicas(
    local_model: LocalModel, optimizers: Sequence[Optimizer], mesh: Mesh
) -> list[str]:
    """Compare what replicas hold, and copy from the majority what differs. Collective.

    Ranks must hold the weights of the same step.

    Returns: a sentence for each rank that was wrong, on every rank.

    Raises: ReplicasDiffer: on every rank, if no majority tells who is wrong.
    """
    if mesh.size == 1 or not local_model.strategy_state.is_synchronous:
        return []
    tensors = replicated_tensors(local_model, optimizers, mesh)
    found = digests([entry.value for entry in tensors])
    parts: dict[str, list[int]] = {}
    for entry, digest in zip(tensors, found, strict=True):
        parts.setdefault(entry.part, []).append(digest)
    summary = {part: _combined(of_part) for part, of_part in parts.items()}
    if _agree([json.loads(text) for text in mesh.all_gather_str(json.dumps(summary))]):
        return []
    details = {
        f"{entry.part}|{entry.name}": [digest, to_local(entry.value).nbytes]
        for entry, digest in zip(tensors, found, strict=True)
    }
    reports = [json.loads(text) for text in mesh.all_gather_str(json.dumps(details))]
    differences = find_differences(reports)
    unclear = [difference for difference in differences if not difference.right]
    if unclear:
        raise ReplicasDiffer(_unclear_message(unclear))
    mine = {(entry.part, entry.name): entry.value for entry in tensors}
    for difference in differences:
        _heal(difference, mine, reports, mesh)
    return _sentences(differences)


def replicated_tensors(
    local_model: LocalModel, optimizers: Sequence[Optimizer], mesh: Mesh
) -> list[Replicated]:
    """Return parameters and optimizer state of this rank, with the part of the model of each."""
    stage = f"stage {mesh.pipeline.rank}" if local_model.is_partial else ""
    tensors = []
    for name, parameter in local_model.module.named_parameters():
        if _is_held(parameter):
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


def find_differences(reports: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return the tensors in which ranks differ.

    Args: reports: for each rank, `part|name` -> (digest, bytes).
    """
    differences = []
    for key in sorted({key for report in reports for key in report}):
        holders = {rank: report[key][0] for rank, report in enumerate(reports) if key in report}
        counts = Counter(holders.values())
        if len(counts) < 2:
            continue
        (digest, count), *_ = counts.most_common(1)
        right = tuple(rank for rank, other in holders.items() if other == digest)
        wrong = tuple(rank for rank in holders if rank not in right)
        part, _, name = key.partition("|")
        has_majority = 2 * count > len(holders)
        differences.append(
            Difference(name, part, wrong if has_majority else (*holders,), right * has_majority)
        )
    return differences


def _is_held(parameter: Tensor) -> bool:
    return not parameter.is_meta and to_local(parameter).numel() > 0


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


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return the digest of each tensor. Waits for the device once."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    found = [0] * len(tensors)
    for indices in by_device.values():
        values = torch.stack([tensor_digest(tensors[index]) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            found[index] = value
    return found


def _combined(digests: Sequence[int]) -> int:
    """Return one number for a list, the same in every process."""
    combined = 0
    for digest in digests:
        combined = (combined * 0x100000001B3 + digest) % (1 << 64)
    return combined


def _agree(summaries: Sequence[Mapping[str, int]]) -> bool:
    seen: dict[str, int] = {}
    pairs = (pair for summary in summaries for pair in summary.items())
    return all(seen.setdefault(part, value) == value for part, value in pairs)


def _heal(
    difference: Difference,
    mine: Mapping[tuple[str, str], Tensor],
    reports: Sequence[Mapping[str, Any]],
    mesh: Mesh,
) -> None:
    """Copy a tensor from the first rank of the majority to those that are wrong. Collective."""
    source = difference.right[0]
    size_bytes = reports[source][f"{difference.part}|{difference.name}"][1]
    held = mine.get((difference.part, difference.name))
    if mesh.rank == source and held is not None:
        message = as_bytes(to_local(held)).to(mesh.device).clone()
    else:
        message = torch.empty(size_bytes, dtype=torch.uint8, device=mesh.device)
    dist.broadcast(message, src=source)
    if mesh.rank in difference.wrong and held is not None:
        local = to_local(held)
        values = message.view(local.dtype) if local.dtype != torch.bool else message.bool()
        local.copy_(values.view(local.shape))


def _sentences(differences: Sequence[Difference]) -> list[str]:
    by_rank: dict[int, list[Difference]] = {}
    for difference in differences:
        for rank in difference.wrong:
            by_rank.setdefault(rank, []).append(difference)
    return [
        f"rank {rank} held other bits than {len(found[0].right)} other ranks in "
        f"{_listed([difference.name for difference in found])}: memory or a computation is faulty "
        f"there. They were copied from rank {found[0].right[0]}"
        for rank, found in sorted(by_rank.items())
    ]


def _unclear_message(differences: Sequence[Difference]) -> str:
    ranks = " and ".join(map(str, differences[0].wrong))
    return (
        f"ranks {ranks} should hold the same bits, and differ in "
        f"{_listed([difference.name for difference in differences])}: memory or a computation is "
        "faulty on one of them. With three replicas or more the majority would tell which. Nothing "
        "is saved; start again from the last checkpoint, on other hardware if it happens again."
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - TOLD_NAMES
    text = ", ".join(names[:TOLD_NAMES])
    return f"{text} and {more} more" if more > 0 else text
