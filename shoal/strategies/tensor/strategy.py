"""Tensor parallelism: layers are divided over the ranks of a tensor group.

All ranks of a group see the same samples.

                    attention                         feed-forward
      rank 0   x ── heads 0, 1 ── output ─┐ x ── hidden units 0..7  ── down ─┐ x
                                         sum                                sum
      rank 1   x ── heads 2, 3 ── output ─┘ x ── hidden units 8..15 ── down ─┘ x

      forward: 2 sums of x for each block        backward: 2 sums of its gradient

Replicated are x, the norms, and all layers that no rule knows. Every rank of the group computes
them alike, from the same parameters and the same random numbers. So their gradients are equal
without communication; the first step checks that.

With `sequence`, each rank has some of the tokens between the divided layers, and each sum becomes
a reduce-scatter and an all-gather:

      rank 0   tokens 0..3 ── norm ─┐ x ── heads 0, 1 ── output ─┐ tokens 0..3 ── add, norm ─┐ x ──
                              all-gather                  reduce-scatter               all-gather
      rank 1   tokens 4..7 ── norm ─┘ x ── heads 2, 3 ── output ─┘ tokens 4..7 ── add, norm ─┘ x ──

In a pipeline, the layers of each stage are divided after the model was. Stages begin between the
pairs of layers, if there are enough such places. The ranks of a tensor group hold the same stage
and make the same actions in the same order, so their collectives match. Each sends its activations,
which are replicated, to the next stage of its own pipeline.

Sources: Shoeybi et al., arXiv:1909.08053 (Megatron-LM); Korthikanti et al., arXiv:2205.05198
(sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.comm.norm import to_local
from shoal.costs.step_cost import StepCost
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import is_compiled
from shoal.strategies.base import (
    STOP,
    Forward,
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
    Strategy,
)
from shoal.strategies.former_modules import FormerModules
from shoal.strategies.full_model import FullModel, free_other_params
from shoal.strategies.options import TensorOptions
from shoal.strategies.tensor.apply import apply
from shoal.strategies.tensor.cost import cost
from shoal.strategies.tensor.graph import Trace, forward_graphs
from shoal.strategies.tensor.plan import TensorPlan, plan
from shoal.strategies.tensor.sequence import gather_all
from shoal.strategies.tensor.sliced_parameters import RefuseSlices, is_tensor_sharded
from shoal.weights.deferred_init import broadcast_filled

PER_STAGE_MESSAGE = (
    "A pair of layers must lie in one stage of the pipeline: put its cuts elsewhere with "
    "cuts=NAME, or leave cuts out; or use fewer stages. "
)
GPU_CHECKSUM_TOLERANCE = 1e-4
"""Largest relative difference of replicated gradients on GPUs, whose kernels add in any order."""


class TensorParallel(TensorOptions, Strategy):
    """Divides layers over the ranks of the tensor axis."""

    takes_empty_weights: ClassVar[bool] = True

    def cost(self, step: StepCost) -> StepCost:
        """Return the cost of slices and their sums: `tensor/cost.py`.

        Raises: StrategyRefused: nothing of the model can be divided.
        """
        if step.layout.tensor == 1:
            return step
        key = ("tensor", self.degree, self.whole, self.sequence)

        def trace(model: nn.Module, leaves: set[nn.Module]) -> Any:
            # Once for all degrees: a plan of many blocks spends most of its time here.
            return step.once(frozenset(leaves), lambda: [*forward_graphs(model, leaves)])

        made = step.once(key, lambda: tensor_plan(step.module, self, trace=trace))
        return cost(made, self.sequence, step)

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Divide the module in place, and return its new parameters and its steps. Collective.

        Raises:
            StrategyRefused: nothing of the model can be divided, with the reasons; or an option
                names a module that the model does not have.
        """
        if mesh.tensor.size == 1:
            return model
        module = model.module
        full_model = model.pipeline.full_model
        if is_compiled(module):
            raise StrategyRefused(
                "tensor: nobody has shown that compiled layers in slices give the same numbers. "
                "Use compile=False (model.compile=false)."
            )
        # Slices of several ranks must be slices of one model.
        broadcast_filled(module, mesh.tensor)
        # In a pipeline, the plan is made for the full model: then all stages agree on it.
        made = tensor_plan(module if full_model is None else full_model.model, self, full_model)
        former = FormerModules(module)
        plan_here = made.within(dict(module.named_modules()))
        apply(plan_here, module, mesh, self.sequence, model.weights)
        former.note_changes()
        if self.sequence:
            # The script, or the next stage, takes whole sequences.
            module.register_forward_hook(_gather_output)
        if full_model is not None:
            # The full parameters that were divided just now.
            free_other_params(full_model.model, module)

        model.renew_params()
        step = TensorParallelStep(model, mesh)
        whole_models = partial(former.whole, mesh.tensor) if full_model is None else None
        outside = replace(model.outside_step, call=step.call, whole_models=whole_models)
        return replace(
            model,
            forward=step.forward,
            run=step.run,
            reduce_gradients=step.reduce_gradients,
            outside_step=outside,
            summary_lines=(*model.summary_lines, *describe(made, self.sequence)),
        )


def tensor_plan(
    model: nn.Module,
    options: TensorParallel,
    full_model: FullModel | None = None,
    trace: Trace = forward_graphs,
) -> TensorPlan:
    """Return the plan for these options. The model is not changed.

    Args:
        full_model: how the model is divided into pipeline stages; None for one stage.
        trace: as for `plan`.

    Raises: StrategyRefused: nothing can be divided, or the options do not fit the model.
    """
    patterns = [pattern.strip() for pattern in options.whole.split("+") if pattern.strip()]
    names = [name for name, _ in model.named_modules() if name]
    keep = {pattern: [n for n in names if fnmatchcase(n, pattern)] for pattern in patterns}
    problems = [f"'{p}' matches no module of the model" for p, found in keep.items() if not found]
    if problems:
        raise StrategyRefused("tensor: whole: " + "\n  ".join(problems))
    made = plan(model, options.degree, tuple(chain(*keep.values())), full_model, trace)
    if not made:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in made.replicated.items())
        per_stage = "" if full_model is None else PER_STAGE_MESSAGE
        raise StrategyRefused(
            f"tensor={options.degree}: nothing of this model can be cut, so every rank would hold "
            f"and compute all of it.\n{reasons}\n{per_stage}Use ddp, or zero3 for less memory."
        )
    if options.sequence and not (made.heads or made.multihead):
        raise StrategyRefused(
            f"tensor={options.degree},sequence=true: no attention of this model is cut, so nothing "
            "says that its stream is a sequence of tokens. Leave out sequence."
        )
    return made


def _gather_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Gather the output of the model, or of a stage. A forward hook."""
    return gather_all(output)


def describe(made: TensorPlan, sequence: bool = False) -> list[str]:
    """Return lines about a plan for the startup summary, one for equal modules of all blocks."""
    head = f"tensor={made.degree}"
    lines = [
        f"{head}: {style}: {_collapse_layer_numbers(names)}"
        for style, names in _names_by_value(made.parallel_styles()).items()
    ]
    if sequence:
        lines.append(
            f"{head}: in slices of the sequence: activations between these layers, in all that "
            "takes each token by itself; anything else gets them whole"
        )
    lines += [
        f"{head}: whole: {_collapse_layer_numbers(names)}: {reason}"
        for reason, names in _names_by_value(dict(made.replicated)).items()
    ]
    return lines


def _names_by_value(values: dict[str, str]) -> dict[str, list[str]]:
    """Group keys by their values, in the order of the first key."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return groups


def _collapse_layer_numbers(names: list[str]) -> str:
    """Return `blocks.0.mlp.up ... blocks.11.mlp.up` as `blocks.*.mlp.up (12)`.

    Names that are numbers alone, as of the layers of an nn.Sequential, stay as they are.
    """
    patterns = {}
    for name in names:
        words = ["*" if word.isdecimal() else word for word in name.split(".")]
        patterns[name] = name if {*words} == {"*"} else ".".join(words)
    return ", ".join(
        f"{pattern} ({len(matches)})" if len(matches) > 1 else matches[0]
        for pattern, matches in _names_by_value(patterns).items()
    )


class TensorParallelStep:
    """A step of which the ranks of a tensor group compute replicated values alike.

    Attributes: checked: True after the first step, in which replicated gradients are compared.
    """

    def __init__(self, model: LocalModel, mesh: Mesh) -> None:
        self.model = model
        self.axis = mesh.tensor
        self.checked = False

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """Run a forward pass. A stop request of one rank becomes one of the group. Collective.

        That happens before the data axis sums the totals, for each rank of the group is on
        another data axis.
        """
        with RefuseSlices(self.model.module, self.axis):
            output = self.model.forward(batch)
        if batch.is_last_microbatch and not self.model.is_partial:
            self.axis.all_reduce_max(output.step_totals[STOP])
        return output

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the models outside of a step. Collective over the tensor axis."""
        with RefuseSlices(self.model.module, self.axis):
            return self.model.outside_step.call(function, *args, **kwargs)

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Run both passes. The totals of a pipeline are known only after all of its passes."""
        result = self.model.run(forward, batch)
        if batch.is_last_microbatch and self.model.is_partial:
            self.axis.all_reduce_max(result.step_totals[STOP])
        return result

    def reduce_gradients(self) -> None:
        """Reduce gradients; in the first step, compare those of replicated parameters."""
        self.model.reduce_gradients()
        if not self.checked:
            self.checked = True
            self._check_replicated_gradients()

    def _check_replicated_gradients(self) -> None:
        """Check that replicated parameters have the same gradients on all ranks. Collective.

        Raises: StrategyRefused: they differ, with the names of the first ones.
        """
        gradients = {
            name: parameter.grad
            for name, parameter in self.model.module.named_parameters()
            if parameter.grad is not None and not is_tensor_sharded(parameter)
        }
        if not gradients:
            return
        checksums = torch.stack([_sum_of_local(grad) for grad in gradients.values()])
        magnitudes = torch.stack([_sum_of_local(grad.abs()) for grad in gradients.values()])
        # In fp16, gradients of the first step may overflow before the loss scale is found.
        checksums = torch.nan_to_num(checksums, nan=0.0, posinf=0.0, neginf=0.0)
        # max(x) + max(-x) is the difference between the largest and the smallest of the ranks.
        largest, negated_smallest = self.axis.all_reduce_max(torch.stack((checksums, -checksums)))
        # A CPU's kernels add in the same order on each rank; a GPU's may not.
        tolerance = 0.0 if checksums.device.type == "cpu" else GPU_CHECKSUM_TOLERANCE
        allowed = torch.nan_to_num(magnitudes) * tolerance
        differs = (largest + negated_smallest > allowed).tolist()
        names = [name for name, differ in zip(gradients, differs, strict=True) if differ]
        if names:
            raise StrategyRefused(
                f"{', '.join(names[:5])}: whole on every rank of the tensor group, but with other "
                "gradients on some. The model computes something else on each rank: random numbers "
                "that are not drawn from torch's generator, the rank, or the time. Make it a "
                "function of its inputs, or use ddp."
            )


def _sum_of_local(gradient: Tensor) -> Tensor:
    """Return the sum of this rank's values in float64; 0 for an empty shard."""
    local = to_local(gradient)
    if not local.numel():
        return local.new_zeros((), dtype=torch.float64)
    return local.detach().double().sum()
