"""The prepared models, optimizers and ranks, as all guards see them.

And functions of torch that are replaced in this process while models are prepared: once, however
many runs there are, and put back with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.mesh import Mesh
from shoal.platform.torch_private.replaced_functions import replace_function
from shoal.strategies.base import LocalModel, no_op


class StepPhase:
    """The phase of a run that guards ask about. As a context it is the passes of a step.

    Attributes:
        in_passes: the passes of `forward_backward` run now.
        in_edit: the user changes weights within `run.edit()`.
        loaded: digest of the weights that the script has loaded by `load_state_dict` since ranks
            have compared it, in the order of the calls; 0 without.
        add_gradients: is given what the script has differentiated outside of passes, and its
            gradients, which have a graph of their own.
    """

    def __init__(self) -> None:
        self.add_gradients: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None] = no_op
        self.in_passes = False
        self.in_edit = False
        self.loaded = 0
        self._depth = 0  # such contexts may lie in one another

    def __enter__(self) -> None:
        self._depth += 1
        self.in_passes = True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self.in_passes = self._depth > 0


@dataclass(frozen=True, eq=False)
class GuardedModels:
    """Everything that was prepared, after all strategies were applied.

    Attributes:
        models: the user's models by their prefix in names of parameters; "" for a single one.
        under: words for messages: " under zero3", or nothing.
        phase: of the run.
        note_once: prints a note once in a run, with facts by name.
    """

    models: Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    local_model: LocalModel
    mesh: Mesh
    under: str
    phase: StepPhase
    note_once: Callable[..., None]

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the user's models show, by name."""
        return {
            f"{prefix}{name}": parameter
            for prefix, model in self.models.items()
            for name, parameter in model.named_parameters()
        }

    @cached_property
    def absent_gradients(self) -> dict[str, nn.Parameter]:
        """Parameters of the user's models whose `.grad` is None after a step because the gradient
        is elsewhere: on servers, in another stage, or in a shard.
        """
        owned = {id(parameter) for parameter in self.local_model.trainable_params.values()}
        remote = self.local_model.remote_optimizer is not None
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and (remote or id(parameter) not in owned)
        }

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules, each with its path in names of parameters, with a dot at the end."""
        for prefix, model in self.models.items():
            for name, module in model.named_modules():
                yield f"{prefix}{name}." if name else prefix, module


class ModuleHook:
    """A hook on a module. A copy or a pickle of the module gets one that does nothing."""

    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return None if self._hook is None else self._hook(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return type(self), ()


Places = tuple[tuple[Any, str], ...]
"""Owners of a function, and its name there: such as TOTAL_NORM of `replaced_functions`."""


class ProcessWidePatch:
    """A replaced function, and the prepared models that it looks at.

    Args: install: replaces the function, and returns a function that puts it back.
    """

    def __init__(self, install: Callable[[ProcessWidePatch], Callable[[], None]]) -> None:
        # A list: each backward pass goes through it, and through a WeakSet it takes longer.
        self._refs: list[ref[GuardedModels]] = []
        self._install = install
        self._put_back: Callable[[], None] | None = None
        self._pauses = 0

    @property
    def active(self) -> list[GuardedModels]:
        """Prepared models of all runs that are still alive, the newest first."""
        return [guarded for known in self._refs if (guarded := known()) is not None]

    def add(self, guarded: GuardedModels, undo: ExitStack) -> None:
        """Look at `guarded`, too, until `undo` is closed."""
        if self._put_back is None:
            self._put_back = self._install(self)
        self._refs = [ref(guarded), *(ref(o) for o in self.active if o is not guarded)]
        undo.callback(self.discard, guarded)

    def discard(self, guarded: GuardedModels) -> None:
        """Forget `guarded`; put the function back if no other is left."""
        self._refs = [ref(other) for other in self.active if other is not guarded]
        if not self._refs and self._put_back is not None:
            self._put_back()
            self._put_back = None

    def pause(self, *_: Any) -> None:
        """Put the function back until `go_on` is called as often."""
        self._pauses += 1
        if self._pauses == 1 and self._put_back is not None:
            self._put_back()

    def go_on(self, *_: Any) -> None:
        """Replace the function again."""
        self._pauses -= 1
        if self._pauses == 0 and self._put_back is not None:
            self._put_back = self._install(self)


def replaced(places: Places, make: Callable[[ProcessWidePatch, Any], Any]) -> ProcessWidePatch:
    """Return the patch of a function by what `make` returns for the patch and the original."""
    return ProcessWidePatch(
        lambda patch: replace_function(places, lambda original: make(patch, original))
    )
