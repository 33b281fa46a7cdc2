"""The units of a model: modules that are called whole, and never divided between stages.

      GPT   wte  wpe  h.0  h.1  h.2  h.3  ln_f  lm_head        units
            GPT.forward, the user's compute_loss               glue: all code around them

A module that holds more than its share of all parameters is looked into, and so are lists.
Layers of torch.nn are not, and modules without parameters belong to the glue. Each call of a unit
has a stage.

Random numbers of a pipeline do not depend on the number of stages:

      code around units     one stream, the same on all ranks of a pipeline
      unit                  a stream of its own, whose seed is the next number of the stream around

Every rank draws the seed of every unit, also of those that other stages compute. So code around
units draws the same noise on all ranks, and a unit draws the same dropout masks in any stage. A
checkpoint around a unit restores the stream around it, and so the seed, when it calls the unit
again.

The generators of Python and NumPy have one stream, which a unit of another stage would not move. So
a function that draws from them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.data.seeds import HostGenerators, preserve_rng_state
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.subclasses import disable_dispatch_modes
from shoal.platform.torch_private.tensor_state import in_function_transform
from shoal.strategies.full_model import given_up_params
from shoal.strategies.module_snapshot import uncompiled
from shoal.strategies.pipeline.absent import ValueName, WalkRefusal, own_functions_refused
from shoal.strategies.pipeline.meta_call import OutputForms
from shoal.strategies.wrap_units import num_parameters


class UnitCall(NamedTuple):
    """One call of a unit: its name, and how often it was called before."""

    unit: str
    turn: int


CallUnit = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(name, forward function, args, kwargs) -> the result of a unit."""


class Units:
    """The units of a model.

    Args:
        model: the user's model.
        names: of the units, in any order.
        device: of this rank.

    Attributes:
        modules: name -> unit, in the order of the model.
        observer: receives the calls of units; None to let them run as they are.
        is_watching: calls of units are reported.
        forms: the results of units without memory; None until a run has observed these units.
        parameters, buffers: id -> name, of all tensors of the model, as of the last `watched`.
        given_up: those of parameters of which this rank keeps no values, and a script may.
    """

    def __init__(self, model: nn.Module, names: Collection[str], device: torch.device) -> None:
        self.model = model
        self.modules = {
            name: module
            for name, module in model.named_modules(remove_duplicate=False)
            if name in names
        }
        self.device = device
        self.observer: CallUnit | None = None
        self.forms: OutputForms | None = None
        self.parameters: dict[int, str] = {}
        self.given_up: dict[int, str] = {}
        self.buffers: dict[int, str] = {}
        self.is_watching = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report calls of units to `observer` inside this context.

        The forward functions are replaced, and not what calls them, so hooks still run. That
        includes calls in a backward pass, by checkpoints around units; they have no observer.
        """
        if self.is_watching:
            yield
            return
        self.parameters = {id(p): name for name, p in self.model.named_parameters()}
        self.given_up = {
            id(old): name
            for name, parameter in self.model.named_parameters()
            for old in given_up_params(parameter)
        }
        self.parameters |= self.given_up
        self.buffers = {id(b): name for name, b in self.model.named_buffers()}
        replaced = []
        self.is_watching = True
        try:
            for name, module in self.modules.items():
                replaced.append((module, vars(module).get("forward")))
                vars(module)["forward"] = partial(self._called, name, module.forward)
            with uncompiled(), own_functions_refused():
                yield
        finally:
            self.is_watching = False
            for module, forward in replaced:
                if forward is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = forward

    @contextmanager
    def observed_by(self, observer: CallUnit) -> Iterator[None]:
        """Report calls to `observer` inside this context."""
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before

    def run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, seed: int) -> Any:
        """Run a unit, with random numbers of its own."""
        with seeded(seed, self.device):
            return forward(*args, **kwargs)

    def trains(self, name: str) -> bool:
        """Return whether a unit has parameters that are trained."""
        return any(parameter.requires_grad for parameter in self.modules[name].parameters())

    def _check_present(self, name: str) -> None:
        """Refuse to compute a unit again, in a backward pass, without its parameters.

        Raises: WalkRefusal: another rank has them.
        """
        parameter = next(self.modules[name].parameters(), None)  # all are here, or none is
        if parameter is not None and parameter.is_meta:
            raise WalkRefusal(
                f"pipeline: a checkpoint computes the block {name} again, which another rank has: "
                "the checkpoint lies around blocks of several stages. Checkpoint block by block, "
                "or cut elsewhere: cuts=NAME."
            )

    def _called(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_function_transform():
            raise StrategyRefused(
                f"pipeline: {name} is called inside of a transform of torch.func (vmap, grad, "
                "jvp), and other ranks hold layers that it would go through. Use ddp."
            )
        if self.observer is not None:
            return self.observer(name, forward, args, kwargs)
        self._check_present(name)
        return self.run(name, forward, args, kwargs, draw_seed())


def find_units(
    model: nn.Module,
    num_stages: int,
    expanded: Collection[str] = (),
    named: Collection[str] = (),
    with_plain: bool = False,
) -> dict[str, nn.Module]:
    """Return the units of a model by name, in the order of the model.

    Args:
        num_stages: a module with more than 1/num_stages of all parameters is looked into.
        expanded: names of modules that are looked into whatever their size.
        named: names of modules that must be units, where the user wants stages to begin.
        with_plain: modules without parameters, such as nn.ReLU, are units too.
    """
    largest = (num_parameters(model) or 1) / num_stages
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def search(path: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        prefix = f"{path}." if path else ""
        holds_named = any(name.startswith(prefix) for name in named)
        is_list = type(module).forward is nn.Module.forward  # as nn.ModuleList
        may_be_unit = path and path not in expanded and not holds_named and not is_list
        if path in named or (may_be_unit and _suits_as_unit(module, largest, with_plain)):
            seen.add(id(module))
            found[path] = module
            return
        for name, child in module.named_children():
            search(f"{prefix}{name}", child)

    search("", model)
    return found


def _suits_as_unit(module: nn.Module, largest: float, with_plain: bool) -> bool:
    """Return True if a module need not be looked into.

    Args:
        largest: number of parameters of a module that is a unit though it could be divided.
        with_plain: a module without parameters and without modules inside is a unit, too.
    """
    size = num_parameters(module)
    if size == 0:
        return with_plain and not any(True for _ in module.children())
    return size <= largest or not _is_divisible(module)


def _is_divisible(module: nn.Module) -> bool:
    """Return whether a module may be looked into: it has modules inside, and is no layer of
    torch.nn.
    """
    if not any(num_parameters(child) for child in module.children()):
        return False
    containers = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
    return isinstance(module, containers) or not type(module).__module__.startswith("torch.nn.")


class StageMap(NamedTuple):
    """The stages of all calls of units in a run on a sample.

    Attributes:
        names: of units, in the order of the model.
        stages: call -> stage; calls in the order of the sample.
    """

    names: Sequence[str]
    stages: Mapping[UnitCall, int]
    last: int

    def stage_of(self, name: str, turn: int) -> int:
        """Return the stage of a call. A call that the sample did not make is beside the ones
        before it.
        """
        for earlier in range(turn, -1, -1):
            stage = self.stages.get(UnitCall(name, earlier))
            if stage is not None:
                return stage
        place = self.names.index(name)
        before = (self.stages.get(UnitCall(other, 0)) for other in reversed(self.names[:place]))
        return next((stage for stage in before if stage is not None), 0)


class Crossing(NamedTuple):
    """The values that cross the cuts for one shape of the batch.

    Attributes:
        names: for each cut the names of the values.
        makers: for each cut the labels of the events that made them, for messages.
        paths: for each cut the checksum of the events before it, and the label of the last one.
    """

    names: list[list[ValueName]]
    makers: list[list[str]]
    paths: list[tuple[int, str]]


_LARGEST_SEED = 2**31 - 1
_DRAWING = ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "poisson", "rrelu")
_DRAWING_ALSO = ("exponential_", "cauchy_", "geometric_", "scaled_dot_product_attention")


def may_draw(label: str) -> bool:
    """Return whether a torch function of this name may draw random numbers."""
    return label in _DRAWING_ALSO or any(word in label for word in _DRAWING)


@contextmanager
def host_draws_refused() -> Iterator[None]:
    """Check that nothing is drawn from the generators of Python and NumPy in this context.

    Raises: WalkRefusal: a number was drawn, which other stages and micro-batches do not know.
    """
    before = HostGenerators.now()
    yield
    if HostGenerators.now() != before:
        raise WalkRefusal(
            "pipeline: compute_loss, or a block that it calls, draws numbers of Python's `random` "
            "or of NumPy, which other stages and micro-batches would not know of. Draw with torch, "
            "or in the loop, and hand the number to compute_loss."
        )


def draw_seed() -> int:
    """Return a seed: the next number of torch's generator on the CPU."""
    with disable_dispatch_modes():  # the step's note of random numbers is about the user's
        return int(torch.randint(_LARGEST_SEED, (), device="cpu"))


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators for the block, and restore them after it; None leaves them alone."""
    if seed is None:
        yield
        return
    with preserve_rng_state([device], beyond_torch=False):
        # torch.manual_seed asks for every kind of device, which takes as long as a small layer.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
