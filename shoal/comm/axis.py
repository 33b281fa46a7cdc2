"""One axis of the mesh: a group of ranks, and their collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.norm import to_local
from shoal.errors import CollectiveFailed, UsageError
from shoal.platform.script_line import caller
from shoal.shm_backend.group import ShoalGroup
from shoal.shm_backend.registration import GLOO_BACKEND_NAME

MOST_MESSAGE_BYTES = 1 << 30
"""The longest message of `all_gather_bytes`."""


@dataclass(frozen=True)
class Axis:
    """The group of this rank along one axis, such as its data-parallel group, or all ranks.

    With one rank, all collectives return at once.

    Attributes:
        rank, size: this rank in its group, and the number of ranks.
        device: of the tensors that the methods make.
        all_groups: the global ranks of all groups along this axis; together they are the world.
            Empty for the world itself.
        group: this rank's group; None for the default group, and if there is one rank.
    """

    rank: int
    size: int
    device: torch.device
    all_groups: tuple[tuple[int, ...], ...] = ()
    group: dist.ProcessGroup | None = None

    @property
    def host_device(self) -> torch.device:
        """The device for numbers that this process knows: the CPU, where no rank waits for a GPU.

        It is `device` if the group, made by the program itself, carries no tensors of the CPU.
        """
        cpu = torch.device("cpu")
        if self.size == 1 or self.device.type == "cpu":
            return cpu
        return cpu if "cpu:" in dist.get_backend_config(self.group) else self.device

    def sum_of_host_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sum numbers that this process knows over all ranks; no rank waits for a GPU. Collective.

        Args: numbers: as many on every rank.
        """
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.host_device)
        total: list[float] = self.all_reduce(tensor).tolist()
        return total

    def on_any_rank(self, fact: bool) -> bool:
        """Return whether a fact holds on any rank; no rank waits for a GPU. Collective."""
        return self.sum_of_host_numbers([fact])[0] > 0

    def is_same(self, value: object) -> bool:
        """Return whether all ranks have a value of the same `repr`. Collective."""
        if self.size == 1:
            return True
        # Six bytes, for a float64 holds integers up to 2^53.
        number = int.from_bytes(sha256(repr(value).encode()).digest()[:6])
        numbers = torch.tensor([number, -number], dtype=torch.float64, device=self.device)
        largest, negated_smallest = self.all_reduce_max(numbers).tolist()
        return bool(largest + negated_smallest == 0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, element by element, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Take the maximum of `tensor` over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Copy the first rank's tensor to all ranks, in place. Collective.

        Of a DTensor, the local shard is copied.
        """
        if self.size > 1:
            dist.broadcast(to_local(tensor), group=self.group, group_src=0)

    def broadcast_module(self, module: nn.Module) -> None:
        """Copy the first rank's parameters and buffers to all ranks. Collective.

        Raises: UsageError: on all ranks, for a sparse buffer.
        """
        for name, buffer in module.named_buffers():
            if self.size > 1 and buffer.layout != torch.strided:
                raise UsageError(
                    f"{name}: a sparse buffer cannot be sent to other ranks. Keep it as a plain "
                    "attribute that every rank makes alike, or register it dense, by .to_dense()."
                )
        for tensor in (*module.parameters(), *module.buffers()):
            self.broadcast_tensor(tensor.detach())

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Copy the first rank's buffers, such as BatchNorm's statistics, to all. Collective."""
        for buffer in module.buffers():
            self.broadcast_tensor(buffer)

    def broadcast_str(self, text: str) -> str:
        """Return the first rank's text on every rank. Collective."""
        return self.all_gather_str(text if self.rank == 0 else "")[0]

    def broadcast_json(self, value: Any) -> Any:
        """Return the first rank's JSON value on every rank. Collective."""
        return json.loads(self.broadcast_str(json.dumps(value)))

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank, in the order of ranks. Collective.

        Raises: CollectiveFailed: as `all_gather_str`.
        """
        texts = self.all_gather_str(json.dumps(value), caller().f_code.co_name)
        return [json.loads(text) for text in texts]

    def all_gather_str(self, text: str, asked_by: str = "") -> list[str]:
        """Return the text of every rank, in the order of ranks. Collective.

        Args: asked_by: name of the function that asks for it; the calling one by default.

        Raises: CollectiveFailed: ranks call from different functions, so their texts are of
            different things.
        """
        if self.size == 1:
            return [text]
        message = f"{asked_by or caller().f_code.co_name}\n{text}".encode()
        messages = all_gather_bytes(message, self.size, self.device, self.group)
        callers, _, texts = zip(*(m.decode().partition("\n") for m in messages), strict=True)
        if len({*callers}) > 1:
            places = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(callers))
            raise CollectiveFailed(f"the ranks exchange texts of different things: {places}.")
        return [*texts]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object: a copy of a model communicates with the same ranks."""
        return self

    def new_group(self) -> dist.ProcessGroup | None:
        """Make a Gloo group of these ranks for messages in the background of training.

        Returns: None for one rank. Collective over the world.
        """
        backend = GLOO_BACKEND_NAME if isinstance(dist.group.WORLD, ShoalGroup) else "gloo"
        return new_group(self.all_groups, backend=backend) if self.size > 1 else None

    def barrier(self) -> None:
        """Wait until all ranks have called this method. Collective."""
        if self.size > 1:
            dist.barrier(group=self.group)


def all_gather_bytes(
    message: bytes, size: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[bytes]:
    """Return the message of every rank, in the order of ranks. Collective.

    Messages may differ in length. They travel as tensors of uint8 and are never unpickled.

    Args:
        size: number of ranks of the group.
        device: one that the group's backend can send from.
        group: None for the default group.

    Raises:
        CollectiveFailed: a rank tells a length below 0, or above MOST_MESSAGE_BYTES: its numbers
            came from elsewhere, or were altered on the way.
    """
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(message)], device=device), group=group)
    check_lengths(told := [int(length) for length in lengths])
    longest = max(told)
    if longest == 0:
        return [b""] * size
    padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(rows, padded.to(device), group=group)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, told, strict=True)]


def check_lengths(told: Sequence[int]) -> None:
    """Raise CollectiveFailed for a length, told by a rank, that no message has.

    Memory of that size would be taken, and whoever reaches a port of Gloo can send numbers.
    """
    for rank, length in enumerate(told):
        if not 0 <= length <= MOST_MESSAGE_BYTES:
            raise CollectiveFailed(
                f"rank {rank} of a group tells of a message of {length:,} bytes, and the longest "
                f"has {MOST_MESSAGE_BYTES:,}. The ranks do not make the same calls, or somebody "
                "else sends to the port of a rank."
            )


def new_group(all_groups: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group of each group of ranks, and return the group of this rank.

    torch wants every rank of the world to make every group. Collective over the world.

    Args: all_groups: global ranks; empty for one group of all ranks.
    """
    self_group: dist.ProcessGroup | None = None
    for ranks in all_groups or [range(dist.get_world_size())]:
        made = dist.new_group(list(ranks), backend=backend)
        if dist.get_rank() in ranks:
            self_group = made
    assert self_group is not None, f"rank {dist.get_rank()} is in none of {all_groups}"
    if "nccl" not in dist.get_backend(self_group):
        # Gloo returns on a rank that has its own connections. Were it to end at once, as a script
        # that only prepares may, a rank that still connects would fail.
        dist.barrier(group=self_group)
    return self_group
