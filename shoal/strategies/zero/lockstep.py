"""Lockstep: all ranks gather and reduce the same units in one order, whichever they compute.

The k-th collective of a rank meets the k-th collective of the others, whatever its purpose. If a
branch of the model depends on the samples, ranks use different units, and the gradient of one unit
would be added to that of another. So all ranks follow one order of units. A rank *stands in* for a
unit that it does not compute: it gathers the unit, and contributes zeros as its gradients.

      order      unit 1     unit 2      unit 3      any more?
      rank 0     computes   computes    stands in   no
      rank 1     computes   stands in   computes    no

[1] *Forward*, all ranks follow `UnitOrder`, and ask each other at its end for further units.
[2] *Backward*, all ranks follow the order from its end, whatever the loss of a rank depends on. A
    token, a zero that is added to the loss, goes through all units as an input and an output.
[3] *Each unit is reduced once*, after the backward pass of its first run, with all parameters that
    it trains: zeros where this rank has no gradient. The ranks then count who had a gradient. A
    parameter that no rank has used gets none.

Hooks around one run of a unit. The engine is `fully_shard`, whose own hooks lie between ours:

      forward, downwards                                   backward, upwards

      pre_forward        stand in for earlier units            ▲  token's gradient goes to the
                         token in place of the inputs          │  unit that ran before
      engine             gathers                               │  reduces gradients
      post_all_gather    inputs in place of the token ── [2] ──│  `_fill`: zeros for missing ones
      the module         computes                              │  computes
      post_compute       token joins the outputs               │
      engine             frees (zero3)                         │  gathers again (zero3)
      post_forward       token leaves the outputs              │
                    ▼

The engine gathers before the backward pass of an output, and reduces after that of all inputs. The
token is an output, so the engine gathers on every rank. The token is the only input, so the engine
reduces on every rank, and not where an inner gradient passes the unit. The token comes back after
all that was computed later than the unit began, because autograd goes backward in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.strategies.finite_check import FiniteCheck
from shoal.strategies.zero.unit_hooks import UnitHooks
from shoal.strategies.zero.unit_order import END_OF_STEP, UnitOrder


class Lockstep:
    """One rank's position in the order of units, and the token of its forward pass.

    A run of unit i has the number 2 i with a token, and 2 i + 1 without one (no gradients).

    Args:
        root: the engine's root, around the user's model.
        model: the user's model, or a container of several.
        units: the units inside `model`, by name.
        trained: names of all trainable parameters, in the same order on every rank.
        frees: units are freed after their forward pass (zero3).
        finite_check: looks at the gradients of this rank before they are reduced.

    Attributes:
        root_hooks: hooks around the forward pass of the root.
        orders: one order for each (user's function, training, gradients enabled).
        order: order of this forward pass; None outside of a forward pass.
        running: name of the unit that computes; empty between units.
        stood_in: this rank stood in for a unit in this forward pass.
        any_stood_in: any rank did, in the last finished forward pass.
        reduces: the next backward pass reduces gradients.
        frees_after_backward: it frees units after the backward pass of their first run.
        lacking: names of parameters for which this rank has given zeros in this step.
        had: names of parameters for which it had a gradient in this step.
    """

    def __init__(
        self,
        data: Axis,
        root: nn.Module,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        trained: list[str],
        frees: bool,
        finite_check: FiniteCheck,
    ) -> None:
        self.data = data
        self.finite_check = finite_check
        self.model = model
        self.trained = trained
        self.frees = frees
        # Numbers of runs travel over the CPU, where no rank waits for a GPU to read them.
        self.group = data.group if data.device.type == "cpu" else data.new_group()
        self.hooks = self._make_hooks(units, root)
        self.root_hooks = self.hooks[-1]
        self.orders: dict[tuple[str, bool, bool], UnitOrder] = {}
        self.order: UnitOrder | None = None
        self.running = ""
        self.stood_in = False
        self.any_stood_in = False
        self.token: Tensor | None = None
        self.reduces = True
        self.frees_after_backward = True
        self.lacking: set[str] = set()
        self.had: set[str] = set()
        self._pending_count: tuple[Tensor, dist.Work] | None = None

    def _make_hooks(self, units: Mapping[str, nn.Module], root: nn.Module) -> list[UnitHooks]:
        """Return the hooks of all units and of the root. Each parameter belongs to one of them."""
        parameters = self.model.named_parameters()
        scalars = {name for name, parameter in parameters if parameter.dim() == 0}
        remaining = [name for name in self.trained if name not in scalars]
        hooks: list[UnitHooks] = []
        for name, module in units.items():
            inside = [parameter for parameter in remaining if parameter.startswith(f"{name}.")]
            hooks.append(UnitHooks(self, 2 * len(hooks), name, module, inside))
            remaining = [parameter for parameter in remaining if parameter not in inside]
        hooks.append(UnitHooks(self, END_OF_STEP, "", root, remaining))
        return hooks

    @contextmanager
    def wrap_unit(self, module: nn.Module) -> Iterator[None]:
        """Register hooks on a unit, inside and outside of the engine's hooks.

        The engine registers its own inside this context.
        """
        hooks = next(hooks for hooks in self.hooks if hooks.module is module)
        uncompiled: Any = torch.compiler.disable  # as the engine's own hooks
        module.register_forward_pre_hook(
            uncompiled(hooks.post_all_gather), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(uncompiled(hooks.post_compute))
        yield
        module.register_forward_pre_hook(
            uncompiled(hooks.pre_forward), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(uncompiled(hooks.post_forward))

    def attach_token(self, loss: Tensor) -> Tensor:
        """Return the loss plus the token, so that its backward pass goes through all units [2]."""
        token = self.token
        self.token = None
        return loss if token is None else loss + token.to(loss)

    def unused(self, also_lacking: set[str]) -> list[str]:
        """Return names of trained parameters that no rank has used in this step, and end the step.

        Collective.

        Args: also_lacking: names of parameters without a gradient on this rank that the engine does
            not reduce.
        """
        lacking = (self.lacking - self.had) | also_lacking
        num_users = torch.tensor([name not in lacking for name in self.trained], dtype=torch.int32)
        work = dist.all_reduce(num_users, group=self.group, async_op=True)
        self.lacking.clear()
        self.had.clear()
        if not lacking:
            # This rank has used all, so no parameter is unused. Others may need the sum.
            self._pending_count = (num_users, work)
            return []
        work.wait()
        counts = zip(self.trained, num_users.tolist(), strict=True)
        return [name for name, num_ranks in counts if num_ranks == 0]

    def close(self) -> None:
        """Wait until other ranks have received the count of `unused`."""
        if self._pending_count is not None:
            _, work = self._pending_count
            work.wait()
            self._pending_count = None

    def begin(self, name: str) -> UnitHooks:
        """Begin a forward pass, with a new token if gradients are enabled.

        Args: name: of the function that computes. Functions that use other units have other orders.

        Returns: the hooks of the root.
        """
        self.close()
        with_gradients = torch.is_grad_enabled()
        key = (name, self.model.training, with_gradients)
        self.order = self.orders.setdefault(key, UnitOrder(self._min_over_ranks))
        self.order.begin()
        self.running = ""
        self.stood_in = False
        self.token = None
        if with_gradients:
            self.token = torch.zeros((), device=self.data.device, requires_grad=True)
        for hooks in self.hooks:
            hooks.will_reduce = hooks.recomputed = False
            hooks.stays = not self.frees
        return self.root_hooks

    def abandon(self) -> None:
        """End a forward pass that has failed."""
        self.order = None
        self.running = ""
        self.token = None

    def advance_to(self, requested: int) -> None:
        """Stand in for units of other ranks until the run `requested` is next. Collective."""
        assert self.order is not None
        for run in self.order.units_before(requested):
            self.hooks[run // 2].stand_in(with_token=run % 2 == 0)

    def end(self) -> None:
        """End a forward pass, when no rank needs a further unit. Collective."""
        self.advance_to(END_OF_STEP)
        self.order = None

    def agree_on_inner(self, number: int, name: str) -> None:
        """Raise StrategyRefused unless all ranks gather the same unit at one place. Collective.

        Args: number, name: of the unit that this rank gathers for a gradient in the forward pass.
        """
        assert self.order is not None
        mine = self.order.position * END_OF_STEP + number
        extremes = torch.tensor([mine, -mine])
        dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=self.group)
        if extremes.tolist() != [mine, -mine]:
            raise StrategyRefused(
                f"zero3: a gradient that is taken inside compute_loss needs {name} on this rank, "
                "and another unit on others, whose samples take other branches. Use zero2, which "
                "keeps what it has gathered."
            )

    def _min_over_ranks(self, requested: int) -> int:
        """Return the minimum of the ranks' numbers, and record if any rank stood in.

        A rank that has ended sends END_OF_STEP if it stood in, and END_OF_STEP + 1 if not.
        """
        if requested >= END_OF_STEP:
            requested = END_OF_STEP + (not self.stood_in)
        number = torch.tensor(requested)
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self.group)
        self.any_stood_in = number.item() == END_OF_STEP
        return min(int(number), END_OF_STEP)
