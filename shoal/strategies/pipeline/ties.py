"""Parameters that several ranks of a pipeline hold, as the tied head of a language model.

      rank 0   token_embedding.weight    gradient a   ──a──>                        a + b
      rank 3   head.weight, the same     gradient b            a + b  <──────       a + b

Each rank steps its copy with the same gradient, so the copies stay equal. Without this the
gradients are wrong and nothing says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.norm import to_local


class Ties:
    """Sums gradients of shared parameters.

    Args:
        shared: name -> the ranks of the pipeline that hold it, ascending, more than one.
        module: what this rank holds.
        aliases: names in `module` of what the whole model calls otherwise.
    """

    def __init__(
        self,
        axis: Axis,
        shared: Mapping[str, Sequence[int]],
        module: nn.Module,
        aliases: Mapping[str, str],
    ) -> None:
        self.axis, self.module = axis, module
        here = {aliases.get(name, name): name for name, _ in module.named_parameters()}
        self.names = list(shared)
        self.held = {
            name: (here[name], list(ranks)) for name, ranks in shared.items() if axis.rank in ranks
        }

    @property
    def owned_by_earlier_stage(self) -> set[str]:
        """Those that a rank before this one holds too."""
        return {name for name, (_, ranks) in self.held.items() if ranks[0] != self.axis.rank}

    def sum(self) -> None:
        """Every holder gets the sum, added up in the order of ranks by the first. Collective over
        the pipeline.

        What no holder has a gradient of gets none: zeros would be stepped with momentum and weight
        decay."""
        if not self.names:
            return
        reached = self._reached()
        for whole_name, (name, ranks) in self.held.items():
            if whole_name not in reached:
                continue
            parameter = self.module.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = to_local(parameter.grad)
            mine.copy_(self._summed(mine.contiguous(), ranks))

    def _reached(self) -> set[str]:
        """Names of those that some holder has a gradient of."""
        mine = {
            name
            for name, (here, _) in self.held.items()
            if self.module.get_parameter(here).grad is not None
        }
        holders = torch.tensor(
            [float(name in mine) for name in self.names], device=self.axis.device
        )
        counted = self.axis.all_reduce(holders).tolist()
        return {name for name, count in zip(self.names, counted, strict=True) if count}

    def _summed(self, gradient: Tensor, ranks: list[int]) -> Tensor:
        first, *others = ranks
        if self.axis.rank != first:
            dist.send(gradient, group=self.axis.group, group_dst=first)
            dist.recv(gradient, group=self.axis.group, group_src=first)
            return gradient
        for other in others:
            theirs = torch.empty_like(gradient)
            dist.recv(theirs, group=self.axis.group, group_src=other)
            gradient = gradient + theirs
        for other in others:
            dist.send(gradient, group=self.axis.group, group_dst=other)
        return gradient
