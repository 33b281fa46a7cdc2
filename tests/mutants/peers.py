"""The ranks of a hand-written loop: collectives that change nothing where there is one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


class Peers:
    """The ranks that train together. All methods but `mine` are collective.

    Args: rank: of this process. size: of the world; 1: no message is sent.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place, and return it."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Give all ranks the values of one, in place, and return them."""
        if self.size > 1:
            distributed.broadcast(tensor, source)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor.contiguous())
        return parts

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            distributed.barrier()

    def mine(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's equal part of a tensor along a dimension."""
        return tensor.chunk(self.size, dim)[self.rank]


class CopyTo(torch.autograd.Function):
    """Identity, whose gradient is added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(gradient.clone()), None


class ReduceFrom(torch.autograd.Function):
    """Sum over the ranks, whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return peers.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GatherFrom(torch.autograd.Function):
    """Joins the parts of the ranks along a dimension; its gradient is added up, and cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return torch.cat(peers.gather(x), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.peers.sum(gradient.clone())
        return ctx.peers.mine(total, ctx.dim).contiguous(), None, None


class ScatterTo(torch.autograd.Function):
    """Cuts a tensor that is equal on all ranks along a dimension; its gradient is joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return peers.mine(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(ctx.peers.gather(gradient), ctx.dim), None, None


class ReduceScatter(torch.autograd.Function):
    """Adds a tensor up over the ranks and cuts the sum; its gradient is joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return peers.mine(peers.sum(x.clone()), dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(ctx.peers.gather(gradient), ctx.dim), None, None
