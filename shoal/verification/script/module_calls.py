"""Calls of modules in a step, with the tensors that they return and the gradients of these.

    nn.Module.__call__  the outermost call with its arguments, and the user's line that made it
    forward hook        calls in the order in which they end; copies of outputs
    tensor hook         the gradient of each output, when the backward pass comes to it

Calls of a trial, of an evaluation, and of layers that a checkpoint computes again are left out.
Of random numbers it is seen whether a generator has moved between two moments:

    batch fetched ── noise of the loop ── layer ends ── noise of the model ── next layer ends
                └── drawn for this layer ──┘└────── drawn for this one ──────────────┘

Ranks draw other numbers than one device, so what is computed from them differs by design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from shoal.data.seeds import HostGenerators
from shoal.data.tree_map import tensors_in
from shoal.platform.script_line import caller, script_line
from shoal.platform.torch_private.c10d import num_collectives
from shoal.platform.torch_private.subclasses import DisableTorchFunction
from shoal.platform.torch_private.tensor_state import in_backward_pass
from shoal.strategies.module_snapshot import is_trial_running
from shoal.verification.script.full_values import is_plain, local_part
from shoal.verification.script.model_names import WRAPPERS, ModelNames
from shoal.verification.script.run_record import CallRecord
from shoal.verification.script.watched_calls import watch


class DrawWatch:
    """Tells if the generators of torch, NumPy and Python have moved since it was asked last.

    Attributes: is_paused: Shoal draws, and the numbers of one device.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._has_batch = False
        self._state = _state()

    def fetched(self) -> None:
        """Leave out what was drawn until a batch was there: by samplers, and by data sets."""
        self._has_batch, self._state = True, _state()

    def called(self) -> None:
        """Leave out what was drawn before the first model of a step that fetched no batch."""
        if not self._has_batch:
            self.fetched()

    def stepped(self) -> None:
        """Begin the next step."""
        self._has_batch = False

    def drew(self) -> bool:
        """Return True if numbers were drawn since the last call of a method."""
        before, self._state = self._state, _state()
        return self._state != before and not self.is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is drawn until the end."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused, self._state = False, _state()


def _state() -> tuple[bytes, HostGenerators]:
    return torch.get_rng_state().numpy().tobytes(), HostGenerators.now()


class ModuleCalls:
    """Records the calls of all modules that belong to models, once it was started.

    Args:
        names: of the models.
        before_model: is called with a model and its arguments, those by keyword too, before it is
            called from outside of all modules.
        draws: tells which calls draw random numbers, or are given drawn ones.

    Attributes:
        calls: those of this step so far.
        collectives: messages of this step so far, while modules computed; -1: not counted.
        is_paused: calls are left out: the passes by which Shoal prepares a step.
        tensors: forward/<call>/<output> and backward/<call>/<output> of this step so far.
    """

    def __init__(
        self,
        names: ModelNames,
        before_model: Callable[[nn.Module, Any], None],
        draws: DrawWatch,
    ) -> None:
        self.calls: list[CallRecord] = []
        self.tensors: dict[str, Tensor] = {}
        self.collectives = 0
        self.is_paused = False
        self._names = names
        self._before_model = before_model
        self._draws = draws
        self._step = 0
        self._lines: list[str] = []
        self._inside = 0
        self._sent_before = 0

    def start(self, stack: ExitStack) -> None:
        """Record until the stack is closed."""
        watch(stack, nn.Module, "__call__", self._call)
        hook = register_module_forward_hook(self._after, always_call=True)
        stack.callback(hook.remove)

    def take(self) -> tuple[list[CallRecord], dict[str, Tensor]]:
        """Return what this step has recorded, and begin the next step."""
        taken = self.calls, self.tensors
        self.calls, self.tensors, self.collectives = [], {}, 0
        self._step += 1
        return taken

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._lines.append(user_line())
        if not _is_wrapper(module):
            self._inside += 1
            self._sent_before = num_collectives() if self._inside == 1 else self._sent_before
        if len(self._lines) == 1 and not is_trial_running() and not in_backward_pass():
            self._draws.called()
            self._before_model(module, (args, kwargs))
        return original(module, *args, **kwargs)

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        line = self._lines.pop() if self._lines else ""
        if not _is_wrapper(module):
            self._inside -= 1
            if self._inside == 0 and self.collectives >= 0:
                sent = num_collectives()
                self.collectives = -1 if sent < 0 else self.collectives + sent - self._sent_before
        is_training = module.training or torch.is_grad_enabled()
        if self.is_paused or not is_training or is_trial_running() or in_backward_pass():
            return
        name = self._names.find(module)
        if name is None:
            return
        index = len(self.calls)
        outputs = [t for t in tensors_in(output) if t.is_floating_point() or t.is_complex()]
        with DisableTorchFunction():  # a pipeline follows what the script calls
            for number, tensor in enumerate(outputs):
                self._keep(f"{index}/{number}", tensor)
        kind = type(module).__name__
        self.calls.append(CallRecord(name, kind, line, len(outputs), self._draws.drew()))

    def _keep(self, place: str, output: Tensor) -> None:
        value = local_part(output)
        if value is None:  # of another stage of a pipeline
            return
        self.tensors[f"forward/{place}"] = value
        if not output.requires_grad or not is_plain(output):
            return
        tensors, step = self.tensors, self._step

        def note(gradient: Tensor | None) -> None:
            # None where a Function's backward pass returns none: DistributedDataParallel's, say.
            part = None if gradient is None else local_part(gradient)
            if part is not None and step == self._step and not is_trial_running():
                key = f"backward/{place}"
                earlier = tensors.get(key)
                tensors[key] = part if earlier is None else earlier + part

        output.register_hook(note)


def _is_wrapper(module: nn.Module) -> bool:
    """Return True for DistributedDataParallel, which sends buffers before its module is called."""
    return type(module).__name__ in (WRAPPERS["module"] or ())


def user_line() -> str:
    """Return the innermost line of the user's that led here, "train.py:41"; "" for none.

    There is none in autograd's threads.
    """
    return script_line(caller(), with_packages=False)
