"""A model that is divided into stages between the calls of its units, and one stage of a run.

What crosses the cuts in the calls of a step is found by all ranks of a pipeline together.

The modules and tensors of one rank keep the names that they have in the full model:

      full model       token_embedding   blocks.0   blocks.1   blocks.2   norm   head
      stage 0          token_embedding   blocks.0   blocks.1
      stage 1                                                  blocks.2   norm   head

So optimizers, files and checkpoints do not depend on the partition of the model.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable, Sequence, Set
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import (
    non_persistent_buffers,
    own_buffers,
    own_modules,
    own_parameters,
)
from shoal.platform.torch_private.pytree import tree_leaves
from shoal.strategies.base import LocalBatch, LossWrapper
from shoal.strategies.full_model import FullModel, enclosing
from shoal.strategies.pipeline.absent import StageDone, filled_result
from shoal.strategies.pipeline.meta_call import form_of
from shoal.strategies.pipeline.plan import agreed
from shoal.strategies.pipeline.schedules import ScheduleTable
from shoal.strategies.pipeline.units import (
    Crossing,
    StageMap,
    Units,
    draw_seed,
    host_draws_refused,
    seeded,
)
from shoal.strategies.pipeline.walk import DryRun, Walk, digest

MAX_CROSSINGS = 4096
"""Dry runs of that many shapes are kept."""


class StageCall(NamedTuple):
    """The user's function with the arguments of one micro-batch.

    Attributes:
        key: what determines the shapes of all values; see `shape_key`.
        seed: of its random numbers; the same for all stages.
    """

    function: Callable[[], Any]
    key: Hashable
    seed: int

    @classmethod
    def of(cls, model: nn.Module, micro: LocalBatch, seed: int) -> StageCall:
        """Return the call of a micro-batch, for a training step."""
        function = micro.function
        return cls(
            partial(function, *micro.args, **micro.kwargs),
            (code_key(function), shape_key(model, (micro.args, micro.kwargs))),
            seed,
        )


class DividedModel:
    """A model with the stages of its units.

    Args:
        parameter_users: name of a parameter -> stages in which code around the units uses it.
        table: the schedule, with the ranks of the stages.
    """

    def __init__(
        self,
        units: Units,
        stage_map: StageMap,
        parameter_users: dict[str, set[int]],
        table: ScheduleTable,
    ) -> None:
        self.units = units
        self.table = table
        self.stage_map = stage_map
        self.parameter_users = parameter_users
        self._crossings: dict[Hashable, Crossing] = {}

    @cached_property
    def stages_by_unit(self) -> dict[str, set[int]]:
        """Map each unit to the stages that call it. One that is not called lies beside the units
        before it.
        """
        stages = {name: {self.stage_map.stage_of(name, 0)} for name in self.units.modules}
        for call, stage in self.stage_map.stages.items():
            stages[call.unit].add(stage)
        return stages

    @property
    def full_model(self) -> FullModel:
        """All modules, with their stages."""
        users = sorted(self.parameter_users)
        return FullModel(self.units.model, self.stages_by_unit, self.stage_map.last, users)

    def targets(self, stage: int) -> set[str]:
        """Return the paths of the units of a stage, and of parameters that code around them
        uses.
        """
        units = {name for name, stages in self.stages_by_unit.items() if stage in stages}
        read = {name for name, stages in self.parameter_users.items() if stage in stages}
        return units | {name for name in read if enclosing(name, units) is None}

    def everywhere(self) -> set[str]:
        """Return the paths of what code around the units uses on every rank: modules without
        tensors, such as nn.Dropout, and buffers, such as tables of sines.
        """
        modules = {
            name
            for name, module in self.units.model.named_modules()
            if name
            and not any(True for _ in (*module.children(), *module.parameters(), *module.buffers()))
        }
        found = modules | {name for name, _ in self.units.model.named_buffers()}
        return {name for name in found if enclosing(name, self.units.modules) is None}

    def modules(self, stage: int) -> list[nn.Module]:
        """Return the units of a stage and all modules inside them."""
        paths = sorted(name for name in self.targets(stage) if name in self.units.modules)
        return [inner for path in paths for inner in self.units.modules[path].modules()]

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that a stage uses, each once.

        The order is the same on all ranks; a split backward pass depends on it.
        """
        found: list[nn.Parameter] = []
        for path in sorted(self.targets(stage)):
            if path in self.units.modules:
                found += self.units.modules[path].parameters()
            else:
                found.append(self.units.model.get_parameter(path))
        return list({id(parameter): parameter for parameter in found}.values())

    def plan(self, calls: Sequence[StageCall], axis: Axis) -> list[Crossing]:
        """Find what crosses the cuts, for each call. Collective if one needs a dry run.

        Args: axis: the pipeline axis.

        Raises: StrategyRefused: the function cannot be divided, or ranks have gone other ways.
        """

        def crossings() -> list[Crossing]:
            return [self.crossing(call) for call in calls]

        if all(call.key in self._crossings for call in calls):
            return crossings()
        found: list[Crossing] = agreed(axis, crossings)
        digests = axis.all_gather_str(json.dumps([digest(crossing) for crossing in found]))
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise StrategyRefused(
                    f"pipeline: ranks 0 and {rank} of a pipeline take other ways through the "
                    "function, for the same batch. It must not depend on the rank, the time or "
                    "random numbers other than those of torch."
                )
        return found

    def crossing(self, call: StageCall) -> Crossing:
        """Return what crosses the cuts: from a dry run, or from an earlier one of the same key.

        Raises: WalkRefusal: the function cannot be divided.
        """
        known = self._crossings.get(call.key)
        if known is not None:
            return known
        dry = DryRun(self.units, self.stage_map)
        with self.units.watched(), seeded(call.seed, self.units.device):
            before = torch.get_rng_state()
            with host_draws_refused():
                found = dry.run(call.function)
            is_constant = _draws_nothing(before, dry.num_seeds)
            if is_constant and len(self._crossings) < MAX_CROSSINGS:
                self._crossings[call.key] = found
        return found

    def run_stage(
        self, stage: int, call: StageCall, crossing: Crossing, received: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run one stage of the function.

        Returns: the values for the next stage; of the last stage, what the function returned.

        Raises: WalkRefusal: the function does something else than in the dry run.
        """
        walk = Walk(self.units, self.stage_map, stage, crossing, received)
        try:
            with (
                self.units.watched(),
                self.units.observed_by(walk.call),
                seeded(call.seed, self.units.device),
                walk,
            ):
                result = call.function()
                walk.end()
        except StageDone:
            return walk.values_to_send(), None
        finally:
            walk.received.walking = False
        return (), filled_result(result)


def shape_key(model: nn.Module, nest: Any) -> Hashable:
    """Return what determines the shapes of all values of a run, and which have gradients."""
    return (
        tuple(module.training for module in model.modules()),
        tuple(parameter.requires_grad for parameter in model.parameters()),
        torch.is_grad_enabled(),
        tuple(form_of(leaf) for leaf in tree_leaves(nest)),
    )


def code_key(function: Any, depth: int = 3) -> Hashable:
    """Return what tells a function from others whose batches have the same shapes.

    A script may have a function for each model, or make its function anew for each step: the code
    counts, with that of the functions that it refers to. It is the same on all ranks.
    """
    if depth == 0:
        return None
    if isinstance(function, partial):
        return code_key(function.func, depth)
    if isinstance(function, LossWrapper):
        return function.purpose, code_key(function.__wrapped__, depth)
    function = getattr(inspect.unwrap(function), "__func__", function)
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    inner = (_content(cell) for cell in function.__closure__ or ())
    return (code, *(code_key(each, depth - 1) for each in inner if inspect.isroutine(each)))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _draws_nothing(before: Tensor, num_seeds: int) -> bool:
    """Return whether the generator has moved since `before` by the seeds of units alone.

    Else the way of the function may follow from what it draws.
    """
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for _ in range(num_seeds):
        draw_seed()
    return torch.equal(after, torch.get_rng_state())


class NameTree(nn.ModuleDict):
    """A node in the tree of names.

    It is a container, so that other strategies treat its children as blocks of the model. A layer
    may be called `values`, so children are looked up in the tables of modules, not as attributes.
    """

    def put(
        self, path: str, value: nn.Module | nn.Parameter | Tensor, persistent: bool = True
    ) -> None:
        """Insert a module, parameter or buffer under its path in the full model."""
        first, _, rest = path.partition(".")
        if rest:
            child = own_modules(self).get(first)
            if child is None:
                child = own_modules(self)[first] = NameTree()
            # Any other child is a module of the model, which contains `rest` already.
            if isinstance(child, NameTree):
                child.put(rest, value, persistent)
        elif isinstance(value, nn.Module):
            own_modules(self)[first] = value
        elif isinstance(value, nn.Parameter):
            own_parameters(self)[first] = value
        else:
            own_buffers(self)[first] = value
            if not persistent:
                non_persistent_buffers(self).add(first)


class StageModule(NameTree):
    """All modules, parameters and buffers of one rank."""

    def forward(self, function: Callable[[], Any]) -> Any:
        """Run one stage as a call of this module, so that other strategies can wrap it as they
        wrap any module.
        """
        return function()


def collect(model: nn.Module, targets: Set[str], others: Set[str] = frozenset()) -> StageModule:
    """Return a module that holds some modules, parameters and buffers of a model.

    Args:
        targets: paths of what the stages use.
        others: paths of parameters and buffers that no stage uses.
    """
    tree = StageModule()
    modules = dict(model.named_modules(remove_duplicate=False))
    # Outer paths first, so that `put` finds an inner path inside its module. All ranks use one
    # order, since they send parameters one after the other.
    for path in sorted(targets | others, key=lambda path: (path.count("."), path)):
        if path in modules:
            tree.put(path, modules[path])
            continue
        owner_path, _, name = path.rpartition(".")
        owner = model.get_submodule(owner_path)
        # A tensor in a plain attribute is in no state dict, and must not get into one here.
        is_plain = name not in own_parameters(owner) and name not in own_buffers(owner)
        persistent = not is_plain and name not in non_persistent_buffers(owner)
        tree.put(path, getattr(owner, name), persistent)
    return tree


def unused(model: nn.Module, all_targets: Set[str]) -> set[str]:
    """Return the names of parameters and buffers that no stage uses.

    Args: all_targets: the targets of all stages.
    """
    used = collect(model, all_targets)
    used_ids = {id(tensor) for tensor in (*used.parameters(), *used.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if id(tensor) not in used_ids}
