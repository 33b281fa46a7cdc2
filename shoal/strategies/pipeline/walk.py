"""A walk: one run of the user's function for one stage of a pipeline and one micro-batch.

                 wte  wpe  (+)  h.0  h.1 │ h.2  h.3 │ h.4  ln_f  lm_head  (cross_entropy)
      stage 0    real real real real real│end
      stage 1     -    -    -    -    -  │real real │end
      stage 2     -    -    -    -    -  │ -    -   │real real real real

[1] Every rank runs the whole function. What comes of a unit or of a parameter is *staged*: it has a
    name, and where another stage computes it stands an absent tensor (`absent.py`). All other
    values follow from the batch; every rank has them, such as masks, positions and labels.
[2] A stage begins with its first unit. From there on, absent values are replaced by what was
    received, wherever they turn up.
[3] It ends where the first unit of the next stage is called, with its arguments complete: code
    between two stages belongs to the earlier one. An exception leaves the function there.
[4] The *path* is a checksum of the events on the way. It must be that of the *dry run*, a walk with
    all units absent. Every rank makes its own, once for each shape of the batch, and compares a
    digest with the other ranks. It tells what crosses each cut: what is made before it and used
    behind it. Skips, encoder outputs and position biases are no special cases.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.platform.script_line import caller
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import function_modes, pop_mode_temporarily
from shoal.strategies.module_snapshot import ModelSnapshot
from shoal.strategies.pipeline.absent import (
    GRADIENT_FUNCTIONS,
    GRADIENT_INSIDE,
    HOOK_FUNCTIONS,
    REQUIRES_GRAD,
    SHAPE_FUNCTIONS,
    AbsentTensor,
    ReceivedValues,
    StageDone,
    ValueName,
    WalkRefusal,
    absent_of,
    filled,
    filled_nest,
    no_hook,
    note_gradients,
    property_of,
    seems_to_require_grad,
    tensors_in,
    tensors_of_result,
)
from shoal.strategies.pipeline.meta_call import (
    DEVICE_FUNCTIONS,
    VALUE_FUNCTIONS,
    call_on_meta,
    device_answer,
    written_target,
)
from shoal.strategies.pipeline.units import Crossing, StageMap, Units, draw_seed, may_draw, seeded


class Walk(TorchFunctionMode):
    """One run of a function.

    Args:
        stage: the stage to compute; None in a dry run, which computes nothing.
        crossing: of the dry run; None in a dry run.
        received: values for the crossing before this stage.

    Attributes:
        at: the stage that the run has come to.
        num_seeds: seeds that the run has drawn for units and functions.
    """

    def __init__(
        self,
        units: Units,
        stage_map: StageMap,
        stage: int | None,
        crossing: Crossing | None = None,
        received: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.units = units
        self.stage_map = stage_map
        self.stage = stage
        self.crossing = crossing
        self.at = 0
        self.labels: list[str] = []
        self.received = ReceivedValues(stage, self.labels, units.device)
        self.kept: dict[ValueName, Tensor] = {}
        self._wanted: set[ValueName] = set()
        if crossing is not None and stage is not None:
            if stage < stage_map.last:
                self._wanted = set(crossing.names[stage])
            if stage > 0:
                names = crossing.names[stage - 1]
                self.received.by_name = dict(zip(names, received, strict=True))
        self._path = 0
        self._paths: list[tuple[int, str]] = []  # at the end of each stage, with the last event
        self._inside = 0
        self._is_done = False
        self._turns: Counter[str] = Counter()
        self.num_seeds = 0
        self._token = object()  # marks tensors that are staged in this walk

    @property
    def is_computing(self) -> bool:
        """True if the run has come to its own stage."""
        return self.at == self.stage

    def values_to_send(self) -> tuple[Tensor, ...]:
        """Return the values for the next stage, after this stage is done."""
        assert self.crossing is not None
        assert self.stage is not None
        sent = []
        names, makers = self.crossing.names[self.stage], self.crossing.makers[self.stage]
        for name, maker in zip(names, makers, strict=True):
            value = self.kept.get(name, self.received.by_name.get(name))
            if value is None:
                raise WalkRefusal(
                    f"pipeline: stage {self.stage} was to send a result of {maker}, and has none. "
                    "What the function computes must not follow from values."
                )
            sent.append(value)
        return tuple(sent)

    def end(self) -> None:
        """Pass to the last stage, whose result the function's is: the function has returned.

        It may have called no block of the last stages, as where one of several models is evaluated.

        Raises: StageDone: the stage of this walk is an earlier one. WalkRefusal: as `pass_to`.
        """
        if self._is_done:
            raise WalkRefusal(
                f"pipeline: the function returned in stage {self.stage} of "
                f"{self.stage_map.last + 1}: it catches BaseException, by which a stage ends. "
                "Catch Exception."
            )
        self.pass_to(self.stage_map.last, "the end")

    # --- functions in the code around units

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SHAPE_FUNCTIONS:
            return self._shape(func, args, kwargs)
        if self._inside:
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if not any(map(self._is_staged, tensors)):
            return func(*args, **kwargs)
        if func in GRADIENT_FUNCTIONS:
            raise WalkRefusal(GRADIENT_INSIDE)
        label = getattr(func, "__name__", "")
        target = written_target(label, args, kwargs)
        self._check_target(target)
        self._event(property_of(func) or label, tensors)
        if func in HOOK_FUNCTIONS and not (self.is_computing and torch.is_grad_enabled()):
            return no_hook(func)
        seed = self._draw_seed() if may_draw(label) else None
        if self.is_computing:
            self._check_local(tensors)
            args, kwargs, target = tree_map(filled, (args, kwargs, target))
            with seeded(seed, self.units.device):
                out = func(*args, **kwargs)
        else:
            if label in VALUE_FUNCTIONS:
                self._refuse_look(label)
            out = call_on_meta(func, args, kwargs, self.received)
            note_gradients(out, tensors, property_of(func) or label)
        self._name_results(target if out is None else out)
        return out

    def _check_target(self, target: Tensor | None) -> None:
        if target is not None and id(target) in self.units.buffers:
            raise WalkRefusal(
                f"pipeline: code around the blocks writes into the buffer "
                f"{self.units.buffers[id(target)]}, which only one rank would see. Do so in a "
                "block."
            )

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what one of SHAPE_FUNCTIONS tells of a value."""
        if func in DEVICE_FUNCTIONS:
            return device_answer(func, args[0], self.units.device)
        if func == REQUIRES_GRAD and not self._inside:
            return seems_to_require_grad(args[0], caller(2))
        return func(*args, **kwargs)

    def _is_staged(self, value: Tensor) -> bool:
        if isinstance(value, AbsentTensor) or id(value) in self.units.parameters:
            return True
        return absent_of(value) is not None or getattr(value, "shoal_staged", 0) is self._token

    def _refuse_look(self, label: str) -> None:
        raise WalkRefusal(
            f"pipeline: {label.strip('_')}() looks at a value of "
            f"{self.labels[-2] if len(self.labels) > 1 else 'a parameter'}, which another rank "
            "computes. What the function does must not follow from it."
        )

    def _check_local(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            name = self.units.parameters.get(id(tensor))
            if name is not None and (tensor.is_meta or id(tensor) in self.units.given_up):
                raise WalkRefusal(
                    f"pipeline: code around the blocks uses {name} in stage {self.stage}, unlike "
                    "in the first step, and another rank holds it. Use it there too, or "
                    "cut elsewhere: cuts=NAME."
                )

    # --- calls of units

    def call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a unit of this stage; return absent values for a unit of another stage."""
        if self._inside:
            return forward(*args, **kwargs)
        stage = self.stage_map.stage_of(name, self._turns[name])
        if stage < self.at:
            raise WalkRefusal(
                f"pipeline: {name} of stage {stage} is called after units of stage {self.at}, "
                "unlike in the first step. What the function does must not follow from values, and "
                "in an evaluation it calls each model as often. To generate text, or average over "
                "flipped images, save by run.save_pretrained or run.save, and do it in one process."
            )
        self._turns[name] += 1
        self.pass_to(stage, name)
        leaves = tree_leaves((args, kwargs))
        self._event(name, leaves)
        seed = self._draw_seed()
        if self.is_computing:
            with self._aside():
                out = self.units.run(name, forward, filled_nest(args), filled_nest(kwargs), seed)
        else:
            assert self.units.forms is not None
            with self._aside():
                out = self.units.forms.results(name, args, kwargs, self.received)
            note_gradients(out, leaves, trains=self.units.trains(name))
        self._name_results(out)
        return out

    def pass_to(self, stage: int, name: str) -> None:
        """Leave the stages before `stage`, for which the unit `name` is called.

        Raises:
            StageDone: the stage of this walk is among them.
            WalkRefusal: the run has come by another path than the dry run.
        """
        while self.at < stage:
            last = self.labels[-1] if self.labels else "nothing"
            if self.crossing is not None and self.crossing.paths[self.at][0] != self._path:
                raise WalkRefusal(
                    f"pipeline: in stage {self.at} the function took another way than for the same "
                    f"shapes before: it called {last} before {name}, and "
                    f"{self.crossing.paths[self.at][1]} then; or something between them differs. "
                    "What the function does must not follow from values, nor from earlier calls, "
                    "and modules that are no blocks can have no backward hooks."
                )
            self._paths.append((self._path, last))
            if self.is_computing:
                self._is_done = True
                raise StageDone
            self.at += 1

    def _draw_seed(self) -> int:
        self.num_seeds += 1
        return draw_seed()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Let operations inside a unit run at full speed."""
        modes = function_modes()
        self._inside += 1
        try:
            with ExitStack() as stack:
                if self in modes:  # below others, such as one that watches what a loss uses
                    above = len(modes) - modes.index(self) - 1
                    others = [stack.enter_context(pop_mode_temporarily()) for _ in range(above)]
                    stack.enter_context(pop_mode_temporarily())
                    for mode in reversed(others):
                        stack.enter_context(mode)
                yield
        finally:
            self._inside -= 1

    # --- events and names

    def _event(self, label: str, used: Sequence[Any]) -> None:
        """Count an event, which uses some values."""
        self.labels.append(label)
        self._path = zlib.crc32(label.encode(), self._path)

    def _name_results(self, out: Any) -> None:
        event = len(self.labels)
        for leaf, value in enumerate(tree_leaves(out)):
            if not isinstance(value, Tensor) or id(value) in self.units.parameters:
                continue
            name = ValueName(event, leaf)
            absent = absent_of(value)
            self._made(name, value)
            if absent is not None:
                absent.value_name = name
            else:
                value.shoal_staged = self._token  # type: ignore[attr-defined]

    def _made(self, name: ValueName, value: Tensor) -> None:
        """Keep a value of this stage that later ones use."""
        if name in self._wanted and absent_of(value) is None:
            self.kept[name] = value


class DryRun(Walk):
    """One run of a function, in which all units are absent.

    Attributes:
        parameter_users: name of a parameter -> stages in which code around units uses it.
    """

    def __init__(self, units: Units, stage_map: StageMap) -> None:
        super().__init__(units, stage_map, None)
        self.parameter_users: dict[str, set[int]] = {}
        self._stage_made: dict[ValueName, int] = {}
        self._size_bytes: dict[ValueName, int] = {}
        self._stage_used: dict[ValueName, int] = {}

    def run(self, function: Callable[[], Any]) -> Crossing:
        """Run the function, and put back what it has changed in the model.

        Raises: WalkRefusal: it cannot be divided.
        """
        saved = ModelSnapshot(self.units.model)
        try:
            with self.units.observed_by(self.call), self:
                result = [*tensors_of_result(function())]
                self.end()
                self._use(result)
        except StageDone:
            pass
        except WalkRefusal:
            # Behind the last unit the rank of the last stage has all values.
            if not self._is_behind_last_unit():
                raise
        finally:
            self.received.forget_written()
            saved.restore()
        self.pass_to(self.stage_map.last, "the end")
        return self._crossing()

    def _refuse_look(self, label: str) -> None:
        if self._is_behind_last_unit():
            raise StageDone
        super()._refuse_look(label)

    def _is_behind_last_unit(self) -> bool:
        calls = self.stage_map.stages
        if self._turns.total() >= len(calls):
            return True
        # A layer before it may have been left out by a random number.
        *_, last = calls
        return self._turns[last.unit] > last.turn

    def _event(self, label: str, used: Sequence[Any]) -> None:
        super()._event(label, used)
        self._use(used)

    def _use(self, used: Sequence[Any]) -> None:
        """Note in which stage these values are used."""
        for value in used:
            absent = absent_of(value)
            if absent is not None:
                self._stage_used[absent.value_name] = self.at
            elif isinstance(value, Tensor) and id(value) in self.units.parameters:
                name = self.units.parameters[id(value)]
                self.parameter_users.setdefault(name, set()).add(self.at)

    def _made(self, name: ValueName, value: Tensor) -> None:
        self._stage_made[name] = self.at
        self._size_bytes[name] = value.numel() * value.element_size()

    def crossing_bytes(self) -> list[int]:
        """Return for each cut the bytes that cross it."""
        return [sum(self._size_bytes[name] for name in names) for names in self._crossing().names]

    def _crossing(self) -> Crossing:
        names = [
            sorted(
                name
                for name, used in self._stage_used.items()
                if self._stage_made.get(name, used) <= cut < used
            )
            for cut in range(self.stage_map.last)
        ]
        makers = [[self.labels[name.event - 1] for name in of_cut] for of_cut in names]
        return Crossing(names, makers, self._paths)


def digest(crossing: Crossing) -> int:
    """Return a checksum of a dry run, to compare with those of other ranks."""
    return zlib.crc32(repr((crossing.names, crossing.makers, crossing.paths)).encode())
