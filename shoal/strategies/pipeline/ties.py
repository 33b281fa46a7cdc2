"""Tied parameters that several ranks of a pipeline hold, such as embedding and head of a GPT.

      rank 0   token_embedding.weight    gradient a   ──a──>                        a + b
      rank 3   head.weight, the same     gradient b            a + b  <──────       a + b

Each rank steps its copy with the same gradient, so the copies stay equal. Without the sum the
copies would drift apart, and no error would show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.norm import to_local


class Ties:
    """Sums the gradients of tied parameters over their ranks.

    Args:
        axis: the pipeline axis.
        shared: name in the full model -> ranks that hold the parameter, ascending, at least two.
            The same on all ranks, also in its order.
        module: the local module.
        aliases: name in `module` -> name in the full model, where they differ.
    """

    def __init__(
        self,
        axis: Axis,
        shared: Mapping[str, Sequence[int]],
        module: nn.Module,
        aliases: Mapping[str, str],
    ) -> None:
        self.axis = axis
        self.module = module
        self._shared = shared
        self._local_names = {aliases.get(name, name): name for name, _ in module.named_parameters()}

    def sum_gradients(self) -> None:
        """Replace each gradient by the sum over all ranks that hold the parameter.

        The first rank adds the gradients in the order of ranks. A parameter without a gradient on
        any rank gets none: with zeros, momentum and weight decay would still change it.
        Collective over the pipeline.
        """
        if not self._shared:
            return
        parameters = dict(self.module.named_parameters())
        local = {
            name: parameters[self._local_names[name]]
            for name, ranks in self._shared.items()
            if self.axis.rank in ranks
        }
        flags = [name in local and local[name].grad is not None for name in self._shared]
        counts = self.axis.sum_of_host_numbers(flags)
        for (name, ranks), count in zip(self._shared.items(), counts, strict=True):
            if name not in local or not count:
                continue
            parameter = local[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = to_local(parameter.grad)
            gradient.copy_(self._sum_over_ranks(gradient.contiguous(), ranks))

    def _sum_over_ranks(self, gradient: Tensor, ranks: Sequence[int]) -> Tensor:
        """Return the sum on each of `ranks`; each of them must call."""
        first, *others = ranks
        group = self.axis.group
        if self.axis.rank != first:
            dist.send(gradient, group=group, group_dst=first)
            dist.recv(gradient, group=group, group_src=first)
            return gradient
        for other in others:
            received = torch.empty_like(gradient)
            dist.recv(received, group=group, group_src=other)
            gradient = gradient + received
        for other in others:
            dist.send(gradient, group=group, group_dst=other)
        return gradient
