"""Hooks around the runs of one unit: the turn of the unit, and the token that goes through it.

`lockstep.py` draws where they lie around the engine's own hooks. A node in the graph tells when the
backward pass of a unit is over: when the gradients of its inputs have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.errors import StrategyRefused
from shoal.platform.torch_private.fsdp import is_gathered, post_forward, pre_forward
from shoal.platform.torch_private.pytree import tree_flatten, tree_unflatten
from shoal.platform.torch_private.tensor_state import in_backward_pass, in_function_transform
from shoal.strategies.finite_check import nonfinite_names, seem_finite
from shoal.strategies.grad_checks import accumulated_twice_error
from shoal.strategies.zero.unit_order import END_OF_STEP

if TYPE_CHECKING:
    from shoal.strategies.zero.lockstep import Lockstep

TOKEN = "_shoal_token"
"""Keyword argument that takes the token through the engine's hooks. The module never sees it."""


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
        """Wait for the unit's turn, and add the token to its inputs. Before the engine gathers."""
        step = self.step
        self.has_token = False
        if torch.is_grad_enabled() and (self.trains or differentiable((inputs, options))[0]):
            refuse_function_transform()  # the gathering of some versions fails inside of one
        if step.order is None:
            return self._check_recompute()
        if step.running:
            raise StrategyRefused(
                f"{self.name} runs inside {step.running}, and is no part of it. Name the class of "
                "modules that hold both, unit=CLASS, or use --strategy ddp."
            )
        if torch.is_grad_enabled():
            self.has_token = self.trains or bool(differentiable((inputs, options))[0])
        if self.number != END_OF_STEP:
            step.advance_to(self.number + (not self.has_token))
            step.running = self.name
            self._choose_if_stays()
        if not self.has_token:
            return None
        self.inputs = inputs, options
        return (), {TOKEN: step.token}

    def _check_recompute(self) -> None:
        """Raise StrategyRefused if a checkpoint recomputes this unit and ranks use different units.

        Recomputing is no forward pass of the order, so ranks could not stand in.
        """
        if self.step.any_stood_in and self.trains and not self.will_reduce:
            raise StrategyRefused(
                f"{self.name} runs without gradients on some ranks only, as it does under a "
                "checkpoint with "
                "use_reentrant=True. Use use_reentrant=False, or --strategy recompute."
            )
        has_shards = any(isinstance(parameter, DTensor) for parameter in self.module.parameters())
        if self.step.any_stood_in and has_shards:
            raise StrategyRefused(
                f"{self.name} is computed again together with other units, and ranks use different "
                "ones. Name the "
                "class of what is computed again at once, unit=CLASS, or use --strategy recompute."
            )

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

    def stand_in(self, with_token: bool) -> None:
        """Gather and reduce as in a run of the unit, without computing it. Collective."""
        step = self.step
        step.stood_in = True
        self._choose_if_stays()
        with torch.set_grad_enabled(with_token):
            options = pre_forward(self.module, {TOKEN: step.token} if with_token else {})
            if with_token:
                step.token = self._fill_on_backward(options[TOKEN])
            post_forward(self.module, step.token)

    @property
    def _engine(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _choose_if_stays(self) -> None:
        """Let the unit stay gathered if an inner gradient has gathered it in this pass.

        The outer gradient may need the weights once more. All ranks decide alike.
        """
        if self.step.frees:
            self.stays = self.stays or is_gathered(self.module)
            self._engine.set_reshard_after_forward(not self.stays, recurse=False)

    def _before_inner_gather(self, _gradient: Tensor) -> None:
        """Agree with all ranks that an inner gradient gathers this unit now. Collective.

        Ranks make the gatherings of the outer backward pass in one order [2] anyway.
        """
        step = self.step
        if step.order is not None and not is_gathered(self.module):
            step.agree_on_inner(self.number, self.name)

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
                step.lacking.add(name)  # before the gradient: hooks of the gradient read the set
                parameter.grad = torch.zeros_like(parameter)
            else:
                step.had.add(name)
                if parameter.grad.layout != torch.strided:  # rows of an embedding
                    parameter.grad = parameter.grad.to_dense()
        self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        """Look for gradients of this rank that are not finite, before the engine reduces them."""
        check = self.step.finite_check
        if not check.enabled:
            return
        check.has_looked = True
        gradients = {name: getattr(owner, key).grad for name, owner, key in self.owners}
        if not seem_finite(gradients.values()):
            names = nonfinite_names(gradients)
            check.found = check.found or bool(names)
            check.names += names


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
