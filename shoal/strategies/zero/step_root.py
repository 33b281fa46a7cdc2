"""The engine's root: a module around the user's models, whose forward pass is that of a step.

      root ───────────────────────────────────────────────┐
      │  compute_loss     model(x) ── model(x) ── head(h) │    units gather and free inside
      └───────────────────────────────────────────────────┘

torch's engine gathers the parameters that are in no unit in the forward pass of its root. A step
may call the model twice, a method of it, a part, or several models. So the root is none of them:
the root's forward pass begins before the user's function and ends with its loss. A model that is
called outside of a step makes a forward pass of its own. Where the loop computes the loss, the
first call of a model begins the forward pass that ends with that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.platform.script_line import caller, script_line
from shoal.platform.torch_private.fsdp import post_forward, pre_forward, reset_after_error
from shoal.strategies.zero.lockstep import Lockstep

Output = TypeVar("Output")


class StepRoot(nn.Module):
    """The module around the user's models. Its forward pass is opened and closed, not called.

    Args:
        module: the user's model, or a container of several.
        release: frees what a forward pass outside of a step has gathered.

    Attributes:
        lockstep: follows the order of units; None on one rank.
        is_open: a forward pass is under way.
        in_step: a step is under way: its forward pass, or its backward pass.
        begin_loss: called when a loop begins to compute a loss by calling a model in training, with
            gradients; None where no loop does.
        end_call: called with the name of a module whose call for such a loss has returned; with ""
            for the first one.
    """

    def __init__(self, module: nn.Module, release: Callable[[], None]) -> None:
        super().__init__()
        self.module = module
        self.release = release
        self.lockstep: Lockstep | None = None
        self.is_open = False
        self.in_step = False
        self.begin_loss: Callable[[], None] | None = None
        self.end_call: Callable[[str], None] | None = None
        self._held = False
        self._opened_by: nn.Module | None = None
        self._normal_mode = ExitStack()

    def run(self, function: Callable[..., Any], work: Callable[[], Output]) -> Output:
        """Call `work` as one forward pass of the root, and return what it returns. Collective.

        Args: function: the user's function in it, under whose name the order of units is kept.
        """
        if self.is_open and not self._held:
            return work()
        if not self._held:
            self._open(name_of(function))
        self._held = False
        try:
            output = work()
        except BaseException:
            self._abandon()
            raise
        closed: Output = self._close(output)
        return closed

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step in this context. A call of a model belongs to the step, also where the
        backward pass computes a unit again.
        """
        self.in_step = True
        try:
            # One thread takes nodes in the reverse order of their making, those of inner gradients
            # too. A unit's gradient is complete then when the token has come back to its inputs.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        except BaseException:
            self._abandon()
            raise
        finally:
            self.in_step = False

    def open_for_calls(self, modules: Iterable[nn.Module]) -> None:
        """Let each call of `modules` outside of a step be one forward pass of the root."""
        uncompiled: Any = torch.compiler.disable
        names = {module: name for name, module in self.module.named_modules()}
        for module in modules:
            on_call = partial(self._on_call, f"call of {names[module]}")
            module.register_forward_pre_hook(uncompiled(on_call), prepend=True)
            module.register_forward_hook(uncompiled(partial(self._on_return, names[module])))
            module.register_forward_hook(uncompiled(self._on_error), always_call=True)

    def is_held(self) -> bool:
        """Return True while a forward pass lasts that a loop has begun for its loss."""
        return self._held

    def end_held(self) -> None:
        """End a forward pass of a loop that no step has ended. Collective."""
        if self._held:
            self._held = False
            self._close(None)
            self.release()

    def _on_call(self, name: str, module: nn.Module, _inputs: Any) -> None:
        if self.is_open or self.in_step:
            return
        self._opened_by = module
        if self.begin_loss is not None and module.training and torch.is_grad_enabled():
            self.begin_loss()
            # A loop may compute several losses that begin with one model.
            self._open(f"loss of a loop, {name}, {script_line(caller())}")
            self._held = True
        else:
            self._open(name)

    def _on_return(self, name: str, module: nn.Module, _inputs: Any, output: Any) -> Any:
        if self._held and self.end_call is not None:
            # The first one to be called has opened the root, which has parameters of its own.
            self.end_call("" if self._opened_by is module else name)
        if self._opened_by is not module:
            return None
        self._opened_by = None
        if self._held:
            return None
        output = self._close(output)
        # Else an optimizer could step the shards of weights that are read whole afterwards.
        self.release()
        return output

    def _on_error(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._opened_by is module:
            self._abandon()

    def _open(self, name: str) -> None:
        """Gather the root's parameters, and begin to follow the order of units. Collective."""
        self.is_open = True
        if torch.is_inference_mode_enabled():
            # Memory for a gathered unit is kept, and a later step could not write into tensors that
            # were made in inference mode.
            self._normal_mode.enter_context(torch.inference_mode(False))
            self._normal_mode.enter_context(torch.no_grad())
        if self.lockstep is None:
            pre_forward(self, {})
            return
        self.lockstep.begin(name)
        hooks = self.lockstep.root_hooks
        _, options = hooks.pre_forward(self, (), {}) or ((), {})
        hooks.post_all_gather(self, (), pre_forward(self, options))

    def _close(self, output: Any) -> Any:
        """End the forward pass, when no rank needs a further unit. Collective."""
        self.is_open = False
        self._normal_mode.close()
        if self.lockstep is None:
            return post_forward(self, output)
        # The token goes through the root in place of the loss, to which it is added later.
        hooks = self.lockstep.root_hooks
        hooks.post_compute(self, (), None)
        post_forward(self, self.lockstep.token)
        return output

    def _abandon(self) -> None:
        """End a forward pass that has failed."""
        self.is_open = self._held = False
        self._opened_by = None
        self._normal_mode.close()
        if self.lockstep is not None:
            self.lockstep.abandon()
        reset_after_error(self)


def name_of(function: Callable[..., Any]) -> str:
    """Return a name for a user's function that is the same on all ranks, and in all steps.

    With its line: a script may have several lambdas.
    """
    # Some ranks may have wrapped it in a trial, because of what is new in their samples.
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    named = function if hasattr(function, "__qualname__") else type(function)
    line = getattr(getattr(named, "__code__", None), "co_firstlineno", 0)
    return f"{named.__module__}.{named.__qualname__}:{line}"
