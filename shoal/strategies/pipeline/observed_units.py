"""The units of a model for a number of stages, and one run of the user's function with them.

The run tells which units are called, how long each takes, and which values leave them by other ways
than what they return. A value that a hook inside a block hands out, say, would be missing in
another stage. So no stage begins between its maker and its user.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.comm.tensor_digest import tensor_digest
from shoal.data.seeds import preserve_rng_state
from shoal.errors import did_you_mean
from shoal.platform.autograd_graph import nodes_behind
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.subclasses import is_fake
from shoal.strategies.full_model import enclosing
from shoal.strategies.grad_checks import read
from shoal.strategies.module_snapshot import ModelSnapshot
from shoal.strategies.options import PipelineOptions
from shoal.strategies.pipeline.absent import (
    GRADIENT_FUNCTIONS,
    GRADIENT_INSIDE,
    SHAPE_FUNCTIONS,
    WalkRefusal,
    tensors_in,
)
from shoal.strategies.pipeline.meta_call import OutputForms
from shoal.strategies.pipeline.units import (
    StageMap,
    UnitCall,
    Units,
    find_units,
    host_draws_refused,
)
from shoal.strategies.wrap_units import num_parameters


class SideWay(NamedTuple):
    """A value that left a unit otherwise than by what the unit returns.

    Attributes:
        made, used: indices of the calls that made it, and up to which it was used.
        user: what used it.
    """

    made: int
    used: int
    user: str


class UnitProfile(TorchFunctionMode):
    """Observes one whole run of a function.

    Args: timed: measure each unit, forward and backward.

    Attributes:
        calls: of units, in order. Those of the first rank of the world, where ranks have agreed.
        times_s: of each call; empty if not timed.
        side_ways: values that leave units.
        mutated_buffers: ids of the buffers into which the run has written; set by its caller.
        registers_hooks: code registers hooks on tensors.
        parameters_around: names of parameters that the code around units uses.
    """

    def __init__(self, units: Units, timed: bool) -> None:
        super().__init__()
        self.units = units
        self.timed = timed
        self.calls: list[UnitCall] = []
        self.times_s: list[float] = []
        self.side_ways: list[SideWay] = []
        self.registers_hooks = False
        self.mutated_buffers: set[int] = set()
        self.parameters_around: set[str] = set()
        self._turns: Counter[str] = Counter()
        self._call = -1  # index of the call inside which the run is; -1 around units
        # id of a tensor -> the call that made it, or -1 for the code around; kept alive.
        self._makers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in GRADIENT_FUNCTIONS and self._call < 0:
            self._check_gradient(tensors_in((args, kwargs or {})))
        out = func(*args, **(kwargs or {}))
        self.registers_hooks = self.registers_hooks or func is Tensor.register_hook
        if func not in SHAPE_FUNCTIONS:
            used = list(tensors_in((args, kwargs or {})))
            until = self._call if self._call >= 0 else len(self.calls) - 1
            self._find_side_ways(used, until, getattr(func, "__name__", ""))
            if self._call < 0:
                names = (self.units.parameters.get(id(x)) for x in used)
                self.parameters_around |= {name for name in names if name is not None}
            else:
                self._mark(out)
        return out

    def call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a unit, and measure it."""
        if self._call >= 0:
            return forward(*args, **kwargs)
        index = len(self.calls)
        self.calls.append(UnitCall(name, self._turns[name]))
        self._turns[name] += 1
        leaves = tree_leaves((args, kwargs))
        self._find_side_ways(leaves, index, name)
        seed = int(torch.randint(2**31 - 1, (), device="cpu"))
        self._call = index
        try:
            run = self._measured if self.timed else self.units.run
            out = run(name, forward, args, kwargs, seed)
        finally:
            self._call = -1
        if self.units.forms is not None and not self.timed:
            self.units.forms.learn_likeness(name, leaves, out)
        for result in tree_leaves(out):
            self._makers.pop(id(result), None)
        return out

    def stage_map(self, stage_starts: Sequence[int]) -> StageMap:
        """Return the stages of all calls."""
        stages = {
            call: sum(start <= index for start in stage_starts)
            for index, call in enumerate(self.calls)
        }
        return StageMap([*self.units.modules], stages, len(stage_starts))

    def _check_gradient(self, roots: Iterable[Tensor]) -> None:
        """Raise WalkRefusal if what is differentiated comes of a parameter of the model."""
        for node in nodes_behind(root.grad_fn for root in roots):
            if id(getattr(node, "variable", None)) in self.units.parameters:
                raise WalkRefusal(GRADIENT_INSIDE)

    def _find_side_ways(self, used: Sequence[Any], until: int, user: str) -> None:
        for value in used:
            made = self._makers.get(id(value), self._call)
            if made not in (self._call, -1):
                self.side_ways.append(SideWay(made, until, user))

    def _mark(self, out: Any) -> None:
        """Note which call has made these tensors."""
        units = self.units
        for value in tree_leaves(out):
            is_of_model = id(value) in units.parameters or id(value) in units.buffers
            if isinstance(value, Tensor) and not is_of_model:
                self._makers[id(value)] = self._call
                self._alive.append(value)

    def _measured(
        self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, seed: int
    ) -> Any:
        """Run a unit forward and backward, differentiated alone, and note the time.

        It runs once: what it has been given may be changed by it, such as a cache.
        """
        device = self.units.device
        copied_args, copied_kwargs = _copied((args, kwargs))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        out = self.units.run(name, forward, copied_args, copied_kwargs, seed)
        _backward(out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.times_s.append(time.perf_counter() - start_s)
        return _copied(out)


def _copied(nest: Any) -> Any:
    """Return copies of all tensors, differentiated alone: a unit may write into its inputs."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        if value.requires_grad:
            # A clone of a leaf is no leaf, and may be written in place.
            return value.detach().requires_grad_().clone()
        return value.clone()

    return tree_map(copy, nest)


def _backward(nest: Any) -> None:
    """Differentiate all tensors of a nest, with gradients of ones."""
    roots = [x for x in tree_leaves(nest) if isinstance(x, Tensor) and x.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def observe_units(
    model: nn.Module, function: Callable[[], Any], options: PipelineOptions, device: torch.device
) -> UnitProfile:
    """Find the units of a model, and run the function once. The model stays as it was.

    Modules are looked into until there are enough places between calls of units. Modules without
    parameters are units only if that does not suffice.

    Raises: WalkRefusal: there are too few.
    """
    expanded: set[str] = set()
    named = set(options.cut_names)
    writers: set[str] = set()
    known = {*dict(model.named_modules(remove_duplicate=False))} - {""}
    unknown = next(iter(named - known), None)
    if unknown is not None:
        raise WalkRefusal(
            f"cuts={options.cuts}: no module of the model is called '{unknown}'; "
            f"{did_you_mean(unknown, known)}"
        )
    with_plain = False
    while True:
        names = find_units(model, options.num_stages, expanded, named | writers, with_plain)
        units = Units(model, names, device)
        profile = observed_run(units, function)
        inside = _used_without_call(profile)
        more_writers = _writers_around(profile) - writers
        if more_writers:
            writers |= more_writers
            continue
        num_places = len(open_places(profile, options))
        if not inside and (num_places + 1 >= options.num_stages or options.cuts):
            return observe_named(units, function)
        more = inside or _largest_divisible(units, named | writers)
        if not more and with_plain:
            reason = side_way(profile) if profile.side_ways else ""
            raise WalkRefusal(
                f"pipeline: {options.num_stages} stages need {options.num_stages - 1} places "
                f"between blocks of the model, and there are {num_places}. {reason}Use fewer "
                "stages."
            )
        with_plain = not more
        expanded |= more


def observe_named(units: Units, function: Callable[[], Any]) -> UnitProfile:
    """Run the function once with these units, and learn the forms of their results."""
    units.forms = OutputForms(units.model, units.modules)
    return observed_run(units, function)


def observed_run(units: Units, function: Callable[[], Any], timed: bool = False) -> UnitProfile:
    """Run the function with all units. The model and the random numbers stay as they were."""
    saved = ModelSnapshot(units.model)
    weights = _weight_digests(units.model)
    profile = UnitProfile(units, timed)
    try:
        with (
            preserve_rng_state([units.device]),
            units.watched(),
            units.observed_by(profile.call),
            profile,
            host_draws_refused(),
        ):
            function()
        profile.mutated_buffers = saved.mutated()
    finally:
        saved.restore()
    for name, digest in _weight_digests(units.model).items():
        if digest != weights[name]:
            raise WalkRefusal(
                f"pipeline: compute_loss, or a forward pass, writes into {name}. One device writes "
                "once in a step; here each micro-batch would, on one of the ranks that hold it. "
                "Compute with another value, such as F.linear(x, self.weight.sign()), write "
                "weights between steps, or use ddp."
            )
    return profile


def _weight_digests(model: nn.Module) -> dict[str, complex]:
    """Return a digest of each parameter that has values, by its name."""
    with_values = {n: p for n, p in model.named_parameters() if not (p.is_meta or is_fake(p))}
    digests = read([*map(tensor_digest, with_values.values())])
    return dict(zip(with_values, digests, strict=True))


def open_places(profile: UnitProfile, options: PipelineOptions) -> list[int]:
    """Return the indices of calls with which a stage may begin; a named one may have no units."""
    closed = {place for way in profile.side_ways for place in range(way.made + 1, way.used + 1)}
    first = 0 if options.cuts else 1
    return [place for place in range(first, len(profile.calls)) if place not in closed]


def side_way(profile: UnitProfile, place: int | None = None) -> str:
    """Tell why no stage begins at a place; None: at any."""
    for way in profile.side_ways:
        if place is None or way.made < place <= way.used:
            maker = profile.calls[way.made].unit
            return (
                f"{maker} makes something that it does not return and {way.user} uses later. "
                "Return it from the block, or switch it off. "
            )
    return "a stage would begin without a block before it."


def _used_without_call(profile: UnitProfile) -> set[str]:
    """Return the units of which modules inside are called without the unit itself."""
    units = profile.units
    called = {call.unit for call in profile.calls}
    used = {enclosing(name, units.modules) for name in profile.parameters_around}
    return {
        name
        for name in used
        if name is not None
        and name not in called
        and any(True for _ in units.modules[name].children())
    }


def _writers_around(profile: UnitProfile) -> set[str]:
    """Return the modules around units that write into buffers of their own, as a BatchNorm without
    weights does. They must be units; a module that contains units cannot be one.
    """
    units = profile.units
    return {
        name
        for name, module in units.model.named_modules()
        if name
        and any(id(buffer) in profile.mutated_buffers for buffer in module.buffers(recurse=False))
        and enclosing(name, units.modules) is None
        and not any(unit.startswith(f"{name}.") for unit in units.modules)
    }


def _largest_divisible(units: Units, named: Set[str]) -> set[str]:
    """Return the unit with most parameters that contains others; empty if there is none."""
    sizes = {
        name: num_parameters(module)
        for name, module in units.modules.items()
        if name not in named
        and any(num_parameters(child) for child in module.children())
        and not isinstance(module, nn.MultiheadAttention)
    }
    return {max(sizes, key=lambda name: sizes[name])} if sizes else set()
