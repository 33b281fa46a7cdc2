"""Trials of an optimizer: does it step each number by itself, and each parameter?

    whole     step({4 x 6 matrix, vector of 4})                  three times, with random gradients
    halves    step({2 x 6, 2}) and step({2 x 6, 2})              rows and gradients of the whole
    alone     step({4 x 6}) and step({4})                        each tensor without the other

An optimizer that looks at whole tensors (LAMB's norms, Muon's orthogonal matrices, Adafactor's
rows and columns, a global norm) takes other steps on the halves, and so on shards. One that looks
at all parameters together (a global norm, LBFGS, Prodigy) takes other steps alone, and so on the
stages of a pipeline. Both are found by what they do, under whatever name.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.seeds import GeneratorStates

STEPS = 3
LEARNING_RATE = 1e-2
"""In place of the group's own, which may be 0 at the beginning of a schedule."""
TOLERANCE_OF_STEPS = 1e-5
ROWS, COLUMNS = 4, 6


@dataclass(frozen=True)
class OptimizerAnswer:
    """The result of a trial of an optimizer.

    Attributes:
        is_elementwise: True if halves of tensors take the steps of the whole; None if it could not
            be tried.
        reason: what was seen, as a part of a sentence.
    """

    is_elementwise: bool | None
    reason: str


def optimizer_is_elementwise(optimizer: Optimizer, dim: int = 0) -> OptimizerAnswer:
    """Return whether an optimizer steps halves of tensors as it steps the whole.

    Copies of the optimizer without state step small tensors with the settings of each group. The
    optimizer itself, its parameters and the generators stay as they are. Not collective.

    Args: dim: dimension that the matrix is cut along; a vector is cut along its only one.
    """
    generators = GeneratorStates({p.device for g in optimizer.param_groups for p in g["params"]})
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _tried(optimizer, dim)
    finally:
        generators.restore()


def optimizer_steps_parameters_alone(optimizer: Optimizer) -> OptimizerAnswer:
    """Return whether an optimizer steps a parameter as it would without the other parameters.

    The rest is as for `optimizer_is_elementwise`. Not collective.
    """
    generators = GeneratorStates({p.device for g in optimizer.param_groups for p in g["params"]})
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _tried_alone(optimizer)
    finally:
        generators.restore()


def _tried_alone(optimizer: Optimizer) -> OptimizerAnswer:
    failure: Exception | None = None
    shapes: list[tuple[int, ...]] = [(ROWS, COLUMNS), (COLUMNS, ROWS)]
    for dtype in _dtypes(optimizer):
        for sparse in (False, True):
            samples = [_Sample(shapes, dtype, 0, sparse, only) for only in (None, 0, 1)]
            try:
                return _compared_alone(optimizer, *samples)
            except Exception as error:  # noqa: BLE001 - it may raise anything
                failure = failure or error
    return _not_tried(failure)


def _compared_alone(
    optimizer: Optimizer, sample: _Sample, first: _Sample, second: _Sample
) -> OptimizerAnswer:
    """Compare the steps of two tensors together with those of each alone, in every group."""
    before = torch.get_rng_state()
    together = _steps(optimizer, sample, None)
    draws = not torch.equal(before, torch.get_rng_state())
    each = _steps(optimizer, first, None), _steps(optimizer, second, None)
    alone = [tensor for pair in zip(*each, strict=True) for tensor in pair]
    answer = _answer(optimizer, sample, together, alone)
    if answer.is_elementwise is not False:
        return answer
    if draws:
        return OptimizerAnswer(False, "it draws random numbers, other ones for each parameter")
    return OptimizerAnswer(
        False,
        f"its steps of a small matrix differ by {answer.reason} when another one is beside it",
    )


def _not_tried(failure: Exception | None) -> OptimizerAnswer:
    return OptimizerAnswer(
        None, f"a copy of it fails on small tensors ({type(failure).__name__}: {failure})"
    )


def _tried(optimizer: Optimizer, dim: int) -> OptimizerAnswer:
    failure: Exception | None = None
    # A vector is left out where an optimizer takes only matrices, and float64 where it takes none.
    for shapes in ([(ROWS, COLUMNS), (ROWS,)], [(ROWS, COLUMNS)]):
        for dtype in _dtypes(optimizer):
            for sparse in (False, True):
                try:
                    return _compared(optimizer, _Sample(shapes, dtype, dim, sparse))
                except Exception as error:  # noqa: BLE001 - it may raise anything
                    failure = failure or error
    return _not_tried(failure)


def _dtypes(optimizer: Optimizer) -> list[torch.dtype]:
    own = next((p.dtype for g in optimizer.param_groups for p in g["params"]), torch.float32)
    return list(dict.fromkeys((torch.float64, own)))


class _Sample:
    """Small tensors with their gradients, whole or as one of two halves.

    Args: only: the index of the one tensor that is kept; None for all.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        dim: int,
        sparse: bool,
        only: int | None = None,
    ) -> None:
        self._dim, self._sparse = dim, sparse
        generator = torch.Generator().manual_seed(0)

        def numbers(shape: tuple[int, ...]) -> Tensor:
            # Rows and columns of different sizes, so that norms of the halves differ.
            scale = 1.0 + torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
            if len(shape) > 1:
                scale = scale + 2.0 * torch.arange(shape[1])
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        kept = slice(None) if only is None else slice(only, only + 1)
        self._values = [numbers(shape) for shape in shapes][kept]
        self._gradients = [[numbers(shape) for shape in shapes][kept] for _ in range(STEPS)]

    def values(self, half: int | None) -> list[Tensor]:
        """Return the values at the beginning; `half` 0 or 1, None for the whole."""
        return [self._cut(value, half) for value in self._values]

    def gradients(self, step: int, half: int | None) -> list[Tensor]:
        """Return the gradients of one step."""
        cut = [self._cut(gradient, half) for gradient in self._gradients[step]]
        return [gradient.to_sparse(1) if self._sparse else gradient for gradient in cut]

    def joined(self, halves: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return whole tensors from their halves."""
        return [
            torch.cat(pair, dim=self._dim if pair[0].dim() > 1 else 0)
            for pair in zip(*halves, strict=True)
        ]

    def _cut(self, tensor: Tensor, half: int | None) -> Tensor:
        if half is None:
            return tensor.clone()
        return tensor.chunk(2, dim=self._dim if tensor.dim() > 1 else 0)[half].clone()


def _compared(optimizer: Optimizer, sample: _Sample) -> OptimizerAnswer:
    """Compare the steps of the whole with those of its halves, with the settings of each group."""
    before = torch.get_rng_state()
    whole = _steps(optimizer, sample, None)
    draws = not torch.equal(before, torch.get_rng_state())
    joined = sample.joined((_steps(optimizer, sample, 0), _steps(optimizer, sample, 1)))
    answer = _answer(optimizer, sample, whole, joined)
    if answer.is_elementwise is not False:
        return answer
    if draws:
        return OptimizerAnswer(False, "it draws random numbers, other ones for each half")
    return OptimizerAnswer(
        False,
        f"on two halves of a small matrix its steps differ by {answer.reason} from those on the "
        "whole, so it looks at whole tensors",
    )


def _answer(
    optimizer: Optimizer, sample: _Sample, whole: list[Tensor], parts: list[Tensor]
) -> OptimizerAnswer:
    """Compare the values after some steps; the reason of a difference is its size."""
    start = sample.values(None) * len(optimizer.param_groups)
    moved = sum(float((a - b).square().sum()) for a, b in zip(whole, start, strict=True)) ** 0.5
    apart = sum(float((a - b).square().sum()) for a, b in zip(whole, parts, strict=True)) ** 0.5
    if not moved:
        return OptimizerAnswer(None, "a copy of it moves nothing")
    if apart <= TOLERANCE_OF_STEPS * moved:
        return OptimizerAnswer(True, "parts take the steps of the whole")
    return OptimizerAnswer(False, f"{100 * apart / moved:.2g} %")


def _steps(optimizer: Optimizer, sample: _Sample, half: int | None) -> list[Tensor]:
    """Return the values of the sample after some steps, once for each group of the optimizer."""
    devices = [p.device for group in optimizer.param_groups for p in group["params"]][:1]
    is_real = bool(devices) and devices[0].type != "meta"
    device = devices[0] if is_real else torch.device("cpu")
    groups = [
        [nn.Parameter(value.to(device)) for value in sample.values(half)]
        for _ in optimizer.param_groups
    ]
    twin = copy_of(optimizer, groups)
    parameters = [parameter for group in groups for parameter in group]
    for step in range(STEPS):
        gradients = [
            gradient.to(device) for _ in groups for gradient in sample.gradients(step, half)
        ]
        step_once(twin, parameters, gradients)
    return [parameter.detach().cpu() for parameter in parameters]


def step_once(twin: Optimizer, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    """Let an optimizer take a step by these gradients, with a closure if it must have one."""

    def closure() -> float:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return 1.0

    closure()
    try:
        twin.step()
    except TypeError:  # It must have a closure, as LBFGS.
        twin.step(closure)


def copy_of(optimizer: Optimizer, groups: list[list[nn.Parameter]]) -> Optimizer:
    """Return an optimizer of the same class and settings, without state, of other parameters.

    No constructor is called, for it may take anything. Attributes are copied; those that hold
    parameters hold the others.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    known: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): defaultdict(dict)}
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        known[id(group["params"])] = parameters
        # Several parameters of a group are one of the sample's, wherever else they are held.
        known |= {id(parameter): parameters[0] for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        hooks = isinstance(value, OrderedDict) and name.endswith("hooks")
        twin.__dict__[name] = OrderedDict() if hooks else copy.deepcopy(value, known)
    for group in twin.param_groups:
        if "lr" in group:
            rate = group["lr"]
            group["lr"] = (
                torch.full_like(rate, LEARNING_RATE)
                if isinstance(rate, Tensor)
                else (LEARNING_RATE)
            )
    return twin
