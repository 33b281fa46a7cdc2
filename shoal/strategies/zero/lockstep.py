"""Lockstep: every rank takes part in gathering and reducing every unit that any rank uses.

A collective pairs the k-th call of one rank with the k-th call of another, whatever either of them
is for. Where a branch depends on the rows, ranks use different units, and the gradient of one unit
would be added to that of another. So all ranks follow one plan, and stand in where they have
nothing to compute:

      plan       unit 1     unit 2      unit 3      any more?
      rank 0     computes   computes    stands in   no
      rank 1     computes   stands in   computes    no

[1] *The plan* is the order in which units run (`plan.py`). Whether anybody wants more is asked
once, at its end. [2] *Backward* the plan is followed from its end, whatever the loss of a rank
depends on: a token, a zero that is added
    to the objective, runs through all units in turn, as an input and an output of each.
[3] *Each unit is reduced once*, after the backward pass of its first run, and always with all that
    it trains: zeros where this rank has no gradient. Who had none is counted afterwards: what no
    rank has used gets no gradient.

To stand in is to gather a unit, to compute nothing, and to give zeros as its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.fsdp import post_forward, pre_forward
from shoal.platform.torch_private.pytree import tree_flatten, tree_unflatten
from shoal.strategies.zero.unit_order import END_OF_STEP, UnitOrder

TOKEN = "_shoal_token"
"""The keyword under which the token passes the engine's hooks; a module never sees it."""


class Lockstep:
    """One rank's place in the plan.

    Args: trained: names of all trainable parameters, in the order of every rank.

    Attributes:
        reduces: the backward pass that comes next reduces gradients.
        lacking: parameters for which this rank has given zeros in this step, by name.
    """

    def __init__(
        self, data: Axis, root: nn.Module, units: Mapping[str, nn.Module], trained: list[str]
    ) -> None:
        self.data, self.root, self.trained = data, root, trained
        self.group = (
            data.group if data.device.type == "cpu" else data.new_group()
        )  # for numbers that wait for no GPU
        whole = {name for name, parameter in root.named_parameters() if parameter.dim() == 0}
        left = [name for name in trained if name not in whole]
        self.members: list[_UnitHooks] = []
        for name, module in units.items():
            inside = [n for n in left if n.startswith(f"{name}.")]
            self.members.append(_UnitHooks(self, 2 * len(self.members), name, module, inside))
            left = [n for n in left if n not in inside]
        self.members.append(_UnitHooks(self, END_OF_STEP, "", root, left))
        self.plans: dict[tuple[bool, bool], UnitOrder] = {}
        self.plan: UnitOrder | None = None  # of this forward pass; None outside of one
        self.running = ""
        self.stood_in, self.apart = False, False  # this rank; any rank
        self.token: Tensor | None = None
        self.reduces = True
        self.lacking: set[str] = set()
        self.had: set[str] = set()
        self.telling: tuple[Tensor, dist.Work] | None = None

    @contextmanager
    def wrap_step(self, module: nn.Module) -> Iterator[None]:
        """While the engine puts its hooks on a unit, or on the root: ours go inside and outside
        of them.
        """
        member = next(m for m in self.members if m.module is module)
        aside: Any = torch.compiler.disable  # as the engine's own
        module.register_forward_pre_hook(
            aside(member.post_all_gather), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(aside(member.post_compute))
        yield
        module.register_forward_pre_hook(aside(member.pre_forward), prepend=True, with_kwargs=True)
        module.register_forward_hook(aside(member.post_forward))

    def attach_token(self, objective: Tensor) -> Tensor:
        """[2] The objective, from which the backward pass goes through all units."""
        token, self.token = self.token, None
        return objective if token is None else objective + token.to(objective)

    def unused(self, also_lacking: set[str]) -> list[str]:
        """Of what is trained, what no rank has used in this step. Collective; a new step begins.

        Args: also_lacking: names of what is reduced elsewhere and for which this rank has no
        gradient."""
        lacking = (self.lacking - self.had) | also_lacking
        used = torch.tensor([name not in lacking for name in self.trained], dtype=torch.int32)
        told = dist.all_reduce(used, group=self.group, async_op=True)
        self.lacking.clear()
        self.had.clear()
        if not lacking:
            self.telling = (
                used,
                told,
            )  # others may have to know; this rank knows already that nothing is unused
            return []
        told.wait()
        return [name for name, ranks in zip(self.trained, used.tolist(), strict=True) if ranks == 0]

    def close(self) -> None:
        """Wait until the others have heard."""
        if self.telling is not None:
            self.telling[1].wait()
            self.telling = None

    def begin(self) -> None:
        """A forward pass begins."""
        self.close()
        grad = torch.is_grad_enabled()
        self.plan = self.plans.setdefault((self.root.training, grad), UnitOrder(self._least))
        self.plan.begin()
        self.running, self.stood_in = "", False
        self.token = torch.zeros((), device=self.data.device, requires_grad=True) if grad else None
        for member in self.members:
            member.reduced = False

    def advance_to(self, wanted: int) -> None:
        """Stand in for others until it is the turn of `wanted`. Collective."""
        assert self.plan is not None
        for run in self.plan.units_before(wanted):
            self.members[run // 2].run_with_dummy_input(differentiated=run % 2 == 0)

    def end(self) -> None:
        """A forward pass ends: for all ranks alike."""
        self.advance_to(END_OF_STEP)
        self.plan = None

    def _least(self, wanted: int) -> int:
        number = torch.tensor(wanted if wanted < END_OF_STEP else END_OF_STEP + (not self.stood_in))
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self.group)
        self.apart = number.item() == END_OF_STEP
        return min(int(number), END_OF_STEP)


class _UnitHooks:
    """A unit, or the root, and what happens around its runs."""

    def __init__(
        self, step: Lockstep, number: int, name: str, module: nn.Module, trained: list[str]
    ) -> None:
        self.step, self.number, self.name, self.module = step, number, name, module
        paths = [name.rpartition(".") for name in trained]
        self.trained = [
            (f"{path}{dot}{key}", step.root.get_submodule(path), key) for path, dot, key in paths
        ]
        self.trains = number == END_OF_STEP or any(
            parameter.requires_grad for parameter in module.parameters()
        )
        self.reduced = False  # after the backward pass of a run that there was already
        self.attach_token = False

    def pre_forward(self, _module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        """Before the engine gathers."""
        step, self.attach_token = self.step, False
        if self.number == END_OF_STEP:
            step.begin()
        elif step.plan is None:
            return self._on_recompute()
        elif step.running:
            raise StrategyRefused(
                f"{self.name} runs inside {step.running}, and is no part of it. Name the class of "
                "modules that hold "
                "both, unit=CLASS, or use --strategy ddp."
            )
        self.attach_token = torch.is_grad_enabled() and (
            self.trains or bool(_differentiable((inputs, options))[0])
        )
        if self.number != END_OF_STEP:
            step.advance_to(self.number + (not self.attach_token))
            step.running = self.name
        return (inputs, options | {TOKEN: step.token}) if self.attach_token else None

    def _on_recompute(self) -> None:
        """Computed again, in the backward pass, by a checkpoint."""
        if self.step.apart and any(
            isinstance(parameter, DTensor) for parameter in self.module.parameters()
        ):
            raise StrategyRefused(
                f"{self.name} is computed again together with other units, and ranks use different "
                "ones. Name the "
                "class of what is computed again at once, unit=CLASS, or use --strategy recompute."
            )

    def post_all_gather(self, _module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        """After the engine has gathered."""
        if self.attach_token:
            self.step.token = self._gate_backward(options[TOKEN])
            return inputs, {key: value for key, value in options.items() if key != TOKEN}
        if self.step.plan is not None or not torch.is_grad_enabled():
            return None
        # A checkpoint of the model's own computes this again and may differentiate here, without a
        # token.
        tensors, replaced = _differentiable((inputs, options))
        return (
            replaced(_OnAllGradients.apply(partial(self._fill, True), *tensors))
            if tensors
            else None
        )

    def post_compute(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Before the engine frees."""
        step = self.step
        step.running = ""
        if self.number == END_OF_STEP:
            step.end()
            step.token = (
                None if step.token is None else step.token.clone()
            )  # the first node of the backward pass
        return (output, step.token) if self.attach_token else None

    def post_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """After the engine has freed."""
        return output[0] if self.attach_token else None

    def run_with_dummy_input(self, differentiated: bool) -> None:
        """Take part in a run of other ranks."""
        step = self.step
        if not differentiated and self.trains and step.token is not None:
            raise StrategyRefused(
                f"{self.name} runs without gradients on some ranks only, as it does under a "
                "checkpoint with "
                "use_reentrant=True. Use use_reentrant=False, or --strategy recompute."
            )
        step.stood_in = True
        with torch.set_grad_enabled(differentiated):
            options = pre_forward(self.module, {TOKEN: step.token} if differentiated else {})
            if differentiated:
                step.token = self._gate_backward(options[TOKEN])
            post_forward(self.module, step.token)

    def _gate_backward(self, token: Tensor) -> Tensor:
        """[3] The token as it goes on; on its way back, just before the engine reduces, it
        fills in.
        """
        first, self.reduced = not self.reduced, True
        (passed,) = _OnAllGradients.apply(partial(self._fill, first), token)
        copy: Tensor = passed.clone()  # the engine warns of outputs that are views
        return copy

    def _fill(self, reduces: bool) -> None:
        """Zeros for all that has no gradient, where the engine is to reduce now."""
        step, reduces = self.step, reduces and self.step.reduces
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(reduces, recurse=False)
        for name, owner, key in self.trained if reduces else ():
            parameter = getattr(owner, key)
            (step.lacking if parameter.grad is None else step.had).add(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class _OnAllGradients(torch.autograd.Function):
    """Passes tensors on, and calls a function when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, fill: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.fill = fill
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fill()
        return None, *gradients


def _differentiable(nest: Any) -> tuple[list[Tensor], Callable[[tuple[Tensor, ...]], Any]]:
    """The tensors of a nest that need a gradient, and a function that puts others in their
    places.
    """
    leaves, spec = tree_flatten(nest)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def replaced(tensors: tuple[Tensor, ...]) -> Any:
        others = dict(zip(places, tensors, strict=True))
        return tree_unflatten([others.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return [leaves[i] for i in places], replaced
