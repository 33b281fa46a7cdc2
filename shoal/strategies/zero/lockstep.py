"""Lockstep: all ranks gather and reduce the same units in one order.

The k-th collective of a rank meets the k-th collective of the others, whatever its purpose. If a
branch of the model depends on the samples, ranks use different units, and the gradient of one unit
would be added to that of another. So ranks compare what they run, and another unit is refused.

      first pass    unit 1 ── unit 2 ── unit 3 ── end      ranks compare each of them
      later ones    unit 1 ── unit 2 ── unit 3 ── end      ranks compare function and first unit

[1] *Forward.* A pass of a function that begins with another unit has another order. The first pass
    of an order records it, and later ones follow it: a rank that leaves it says so before it
    gathers anything.
[2] *Backward*, all ranks follow the order from its end, whatever the loss of a rank depends on. A
    token, a zero that is added to the loss, goes through all units as an input and an output.
[3] *Each unit is reduced once*, after the backward pass of its first run, with all parameters that
    it trains: zeros where this rank has no gradient. The ranks then count who had a gradient. A
    parameter that no rank has used gets none.

Hooks around one run of a unit. The engine is `fully_shard`, whose own hooks lie between ours:

      forward, downwards                                   backward, upwards

      pre_forward        compare with the order                ▲  token's gradient goes to the
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

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.fsdp import is_gathered
from shoal.platform.torch_private.pytree import tree_flatten, tree_unflatten
from shoal.platform.torch_private.tensor_state import in_backward_pass, in_function_transform
from shoal.strategies.base import LocalModel
from shoal.strategies.grad_checks import accumulated_twice_error

END_OF_STEP = 2**31
"""Number of the end of a forward pass. Greater than all numbers of runs."""
LEFT_OUT = (
    "A loop that leaves out a loss after the models were called calls run.backward(0 * loss) in "
    "place of run.backward(loss), or the models under torch.no_grad(). "
)
TOKEN = "_shoal_token"
"""Keyword argument that takes the token through the engine's hooks. The module never sees it."""


class Lockstep:
    """One rank's position in the order of units, and the token of its forward pass.

    The order of a pass has the numbers of its runs, and END_OF_STEP behind the last one.

    A run of unit i has the number 2 i with a token, and 2 i + 1 without one (no gradients).

    Args:
        root: the engine's root, around the user's model.
        local: the local model, whose parameters have one order on all ranks.
        units: the units inside its module, by name.
        frees: units are freed after their forward pass (zero3).

    Attributes:
        root_hooks: hooks around the forward pass of the root.
        orders: one order for each (user's function, training, gradients enabled, first run).
        order: order of this forward pass, as far as it is known; None outside of a forward pass.
        position: how many runs of it are done.
        running: name of the unit that computes; empty between units.
        reduces: the next backward pass reduces gradients.
        frees_after_backward: it frees units after the backward pass of their first run.
        lacking: names of parameters for which this rank has given zeros in this step.
        had: names of parameters for which it had a gradient in this step.
    """

    def __init__(
        self,
        data: Axis,
        root: nn.Module,
        local: LocalModel,
        units: Mapping[str, nn.Module],
        frees: bool,
    ) -> None:
        self.data = data
        self.finite_check = local.finite_check
        self.model = local.module
        self.trained = [*local.trainable_params]
        self.frees = frees
        # Numbers of runs travel over the CPU, where no rank waits for a GPU to read them.
        self.group = data.group if data.device.type == "cpu" else data.new_group()
        self.hooks = self._make_hooks(units, root)
        self.root_hooks = self.hooks[-1]
        self.orders: dict[tuple[str, bool, bool, int], list[int]] = {}
        self.order: list[int] | None = None
        self.position = 0
        self.running = ""
        self._key = ("", False, False)
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

    def begin(self, name: str) -> None:
        """Begin a forward pass, with a new token if gradients are enabled.

        Args: name: of the function that computes. Each function has orders of its own.
        """
        self.close()
        with_gradients = torch.is_grad_enabled()
        self._key = (name, self.model.training, with_gradients)
        self.order = []
        self.position = 0
        self.running = ""
        self.token = None
        if with_gradients:
            self.token = torch.zeros((), device=self.data.device, requires_grad=True)
        for hooks in self.hooks:
            hooks.will_reduce = hooks.recomputed = False
            hooks.stays = not self.frees

    def abandon(self) -> None:
        """End a forward pass that has failed."""
        self.order = None
        self.running = ""
        self.token = None

    def take_turn(self, run: int, name: str) -> None:
        """Check that all ranks do the same run now. Collective where the order does not tell.

        Args:
            run: its number; END_OF_STEP at the end of a forward pass.
            name: of its unit.

        Raises: StrategyRefused: another rank does another one, or this one did in an earlier pass.
        """
        assert self.order is not None
        if self.position == 0:
            function = zlib.crc32(repr(self._key).encode()) % 2**29
            is_same = self.is_same_on_all_ranks(2 * END_OF_STEP * function + run)
        elif self.position < len(self.order):
            is_same = self.order[self.position] == run
        else:
            is_same = self.is_same_on_all_ranks(run)
        if not is_same:
            self._check_frozen()
            first, *behind = *self.order, run
            cure = LEFT_OUT if first in behind else ""
            raise StrategyRefused(
                f"zero: {name or 'the end of the loss'} comes where other blocks of the model come "
                "on another rank, or came in an earlier step of this function. All ranks must use "
                f"the same blocks in one order, whatever their samples are. {cure}Make the module "
                "that chooses among blocks one unit, unit=CLASS; give each kind of step a function "
                "of its own; or use ddp."
            )
        if self.position == 0:
            self.order = self.orders.get((*self._key, run), [])
        if self.position == len(self.order):
            self.order.append(run)
        self.position += 1

    def _check_frozen(self) -> None:
        """Raise StrategyRefused if a parameter that was frozen has a gradient now."""
        parameters = self.model.named_parameters()
        thawed = [name for name, p in parameters if p.requires_grad and name not in self.trained]
        if thawed:
            raise StrategyRefused(
                f"zero: {', '.join(thawed)}: unfrozen after prepare, so its gradients are not "
                "reduced. Unfreeze it, with a learning rate of 0 as long as it is to rest, before "
                "run.prepare(...), or freeze it again."
            )

    def end(self) -> None:
        """End a forward pass, if no rank runs a further unit. Collective in the first pass."""
        self.take_turn(END_OF_STEP, "")
        assert self.order is not None
        self.orders[*self._key, self.order[0]] = self.order
        self.order = None

    def is_same_on_all_ranks(self, number: int) -> bool:
        """Return whether all ranks have given the same number. Collective."""
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=self.group)
        return extremes.tolist() == [number, -number]


class UnitHooks:
    """Hooks around the runs of one unit, or of the root.

    Args:
        number: number of its runs with a token; END_OF_STEP for the root.
        name: path of the unit; empty for the root.
        trained: names of the trainable parameters that the engine reduces with it.

    Attributes:
        will_reduce: a run of this forward pass reduces the unit already.
        has_token: the token goes through the run that computes.
        inputs: of the module, while the engine sees the token in their place.
        stays: the unit stays gathered between its runs of this pass.
        recomputed: a reentrant checkpoint has computed it again, and so its gradients are reduced.
    """

    def __init__(
        self, step: Lockstep, number: int, name: str, module: nn.Module, trained: list[str]
    ) -> None:
        self.step = step
        self.number = number
        self.name = name
        self.module = module
        self.owners: list[tuple[str, nn.Module, str]] = []  # name, owner module, attribute
        for parameter in trained:
            path, _, key = parameter.rpartition(".")
            self.owners.append((parameter, step.model.get_submodule(path), key))
        self.trains = number == END_OF_STEP or any(
            parameter.requires_grad for parameter in module.parameters()
        )
        self.will_reduce = False
        self.has_token = False
        self.inputs: tuple[Any, Any] = ((), {})
        self.stays = False
        self.recomputed = False

    def pre_forward(self, _module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        """Check the unit's turn, and add the token to its inputs. Before the engine gathers."""
        step = self.step
        self.has_token = False
        if torch.is_grad_enabled() and (self.trains or differentiable((inputs, options))[0]):
            refuse_function_transform()  # the gathering of some versions fails inside of one
        if step.order is None:
            return None
        if step.running:
            raise StrategyRefused(
                f"{self.name} runs inside {step.running}, and is no part of it. Name the class of "
                "modules that hold both, unit=CLASS, or use --strategy ddp."
            )
        if torch.is_grad_enabled():
            self.has_token = self.trains or bool(differentiable((inputs, options))[0])
        if self.number != END_OF_STEP:
            step.take_turn(self.number + (not self.has_token), self.name)
            step.running = self.name
            if step.frees:
                # If an inner gradient has gathered it in this pass, the outer one may need the
                # weights once more. All ranks decide alike.
                self.stays = self.stays or is_gathered(self.module)
                self._engine.set_reshard_after_forward(not self.stays, recurse=False)
        if not self.has_token:
            return None
        self.inputs = inputs, options
        return (), {TOKEN: step.token}

    def post_all_gather(self, _module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        """Remove the token from the inputs, after the engine has gathered."""
        if self.has_token:
            self.step.token = self._fill_on_backward(options[TOKEN])
            inputs, self.inputs = self.inputs, ((), {})
            return inputs
        if self.step.order is not None or not torch.is_grad_enabled():
            return None
        # A checkpoint of the model's own recomputes this unit. It may differentiate here, where
        # there is no token, so the unit's inputs take its place.
        tensors, replaced = differentiable((inputs, options))
        if not tensors:
            return None
        if in_backward_pass() and self.owners and not self.will_reduce:
            if self.recomputed:
                raise accumulated_twice_error(self.owners[0][0])
            self.recomputed = True
        return replaced(call_on_gradients(partial(self._fill, True), tensors))

    def post_compute(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Add the token to the outputs, before the engine frees."""
        step = self.step
        step.running = ""
        if self.number == END_OF_STEP:
            step.end()
            if step.token is not None:
                step.token = step.token.clone()  # the first node of the backward pass
        elif step.frees and torch.is_grad_enabled():
            for tensor in differentiable(output)[0]:
                tensor.register_hook(self._before_inner_gather)
        return (output, step.token) if self.has_token else None

    def post_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Remove the token from the outputs, after the engine has freed."""
        return output[0] if self.has_token else None

    @property
    def _engine(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _before_inner_gather(self, _gradient: Tensor) -> None:
        """Agree with all ranks that an inner gradient gathers this unit now. Collective.

        Ranks make the gatherings of the outer backward pass in one order [2] anyway.
        """
        step = self.step
        if step.order is None or is_gathered(self.module):
            return
        if not step.is_same_on_all_ranks(step.position * END_OF_STEP + self.number):
            raise StrategyRefused(
                f"zero3: a gradient that is taken inside compute_loss needs {self.name} on this "
                "rank, and another unit on others, whose samples take other branches. Use zero2, "
                "which keeps what it has gathered."
            )

    def _fill_on_backward(self, token: Tensor) -> Tensor:
        """Return the token for the outputs. Its backward pass calls `_fill` before the engine
        reduces; only the first run of a forward pass reduces [3].
        """
        is_first_run = not self.will_reduce
        self.will_reduce = True
        (passed,) = call_on_gradients(partial(self._fill, is_first_run), [token])
        return passed.clone()  # the engine warns of outputs that are views

    def _fill(self, is_first_run: bool) -> None:
        """Set zeros for missing gradients if the engine reduces the unit now."""
        step = self.step
        reduces = is_first_run and step.reduces
        self._engine.set_requires_gradient_sync(reduces, recurse=False)
        frees = step.frees_after_backward if is_first_run else not self.stays
        self._engine.set_reshard_after_backward(frees, recurse=False)
        if not reduces:
            return
        for name, owner, key in self.owners:
            parameter = getattr(owner, key)
            if parameter.grad is None:
                step.lacking.add(name)
                parameter.grad = torch.zeros_like(parameter)
            else:
                step.had.add(name)
                if parameter.grad.layout != torch.strided:  # rows of an embedding
                    parameter.grad = parameter.grad.to_dense()
        step.finite_check.has_looked = True
        step.finite_check.look({name: getattr(owner, key).grad for name, owner, key in self.owners})


def call_on_gradients(
    callback: Callable[[], None], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the tensors, with a node in the graph that calls `callback` in the backward pass.

    The node runs once, when the gradients of all returned tensors are there.

    Raises: StrategyRefused: as `refuse_function_transform`.
    """
    refuse_function_transform()
    outputs: tuple[Tensor, ...] = _GradientCallback.apply(callback, *tensors)
    return outputs


def refuse_function_transform() -> None:
    """Raise StrategyRefused if a transform of torch.func is active.

    No callback of gradients goes through it.
    """
    if in_function_transform():
        raise StrategyRefused(
            "zero: compute_loss calls a unit inside of a transform of torch.func (vmap, grad, "
            "jvp), which gathers no parameters again in its backward pass. Use ddp."
        )


class _GradientCallback(torch.autograd.Function):
    """Identity of tensors; its backward pass calls a function and passes gradients on."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.callback()
        return None, *gradients


def differentiable(nest: Any) -> tuple[list[Tensor], Callable[[tuple[Tensor, ...]], Any]]:
    """Return the tensors of a nest that need a gradient, and a function that replaces them.

    The function takes as many tensors, and returns the nest with these in their places.
    """
    leaves, spec = tree_flatten(nest)
    indices = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]

    def replaced(tensors: tuple[Tensor, ...]) -> Any:
        by_index = dict(zip(indices, tensors, strict=True))
        new_leaves = [by_index.get(index, leaf) for index, leaf in enumerate(leaves)]
        return tree_unflatten(new_leaves, spec)

    return [leaves[index] for index in indices], replaced
