"""Tensor parallelism: each layer in slices, one on each rank of a tensor group; all of them see the
same samples.

                    attention                          feed-forward
      rank 0   x ── heads 0, 1 ── output ─┐ x ── hidden units 0..7  ── down ─┐ x
                                        total                              total        forward: 2 sums of x a block
      rank 1   x ── heads 2, 3 ── output ─┘ x ── hidden units 8..15 ── down ─┘ x        backward: 2 sums of its gradient

What is whole (the stream x, norms, whatever no rule knows) is computed by every rank of the group
alike, from the same parameters and the same random numbers, so that its gradients are equal without
a word; the first step makes sure.

With `sequence`, what lies between, the stream and its norms, is no longer done by every rank alike.
Each rank has some of the tokens there, and the sum falls into its two halves:

      rank 0   tokens 0..3 ── norm ─┐ x ── heads 0, 1 ── output ─┐ tokens 0..3 ── add, norm ─┐ x ── hidden units ...
                              all-gather                  reduce-scatter               all-gather
      rank 1   tokens 4..7 ── norm ─┘ x ── heads 2, 3 ── output ─┘ tokens 4..7 ── add, norm ─┘ x ── hidden units ...

In a pipeline the layers of each stage are cut so, and stages begin where no pair of layers is
parted, if there are such places (`pipeline/together.py`). The ranks of a tensor group hold the same
stages and take the same actions in the same order, so their sums meet; each sends what is whole,
alike on all of them, along its own pipeline.

Sources: Shoeybi et al., arXiv:1909.08053 (Megatron-LM); Korthikanti et al., arXiv:2205.05198
(sequence)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.mesh import Mesh
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
from shoal.strategies.colocation import Colocation
from shoal.strategies.full_model import FullModel, free_other_params
from shoal.strategies.options import TensorOptions
from shoal.strategies.tensor.apply import apply
from shoal.strategies.tensor.plan import NO_PAIR, TensorPlan, plan
from shoal.strategies.tensor.sequence import gather_all
from shoal.strategies.tensor.user_plan import matching

PER_STAGE_MESSAGE = (
    "A pair of layers must lie in one stage of the pipeline: put its cuts elsewhere with "
    "cuts=NAME, or leave cuts out; "
    "or use fewer stages. "
)
SEPARATED_MESSAGE = "a stage of the pipeline begins between it and what makes a pair with it"


class TensorParallel(TensorOptions, Strategy):
    """Cuts layers along the tensor axis."""

    def colocations(self, full_model: FullModel) -> list[Colocation]:
        """What can only be cut where it lies in one stage. Raises StrategyRefused: a name that is
        none of the model's.

        Args: full_model: a model that is one stage.
        """
        made = (
            _planned(full_model.model, self, full_model)
            if self.degree > 1
            else TensorPlan(self.degree)
        )
        pairs = [Colocation({*pair.columns, pair.row}) for pair in made.pairs]
        return pairs + [Colocation({head}, through_output=True) for head in made.vocabulary_heads]

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replaces module (in place), forward or run, owned, reduce and said. Collective.

        Raises: StrategyRefused: nothing of the model can be cut, with the reasons; a name that is
        none of its modules."""
        if mesh.tensor.size == 1:
            return model
        if is_compiled(model.module):
            raise StrategyRefused(
                "tensor: nobody has shown that compiled layers in slices give the same numbers. "
                "Use compile=False "
                "(model.compile=false)."
            )
        mesh.tensor.broadcast_module(model.module)
        made = tensor_plan(
            model.module if model.full_model is None else model.full_model.model,
            self,
            model.full_model,
        )
        apply(made.within(dict(model.module.named_modules())), model.module, mesh, self.sequence)
        if self.sequence:
            model.module.register_forward_hook(_gather_output)
        if model.full_model is not None:
            free_other_params(
                model.full_model.model, model.module
            )  # wholes of what is in slices now
        held = {
            model.tied_names.get(name, name): parameter
            for name, parameter in model.module.named_parameters()
        }
        engine = TensorParallelStep(model, mesh)
        owned = {name: held[name] for name in model.trainable_params}
        said = (*model.summary_lines, *describe(made, self.sequence))
        return replace(
            model,
            forward=engine.forward,
            run=engine.run,
            trainable_params=owned,
            reduce_gradients=engine.reduce,
            summary_lines=said,
        )


def tensor_plan(
    model: nn.Module, options: TensorParallel, uncut: FullModel | None = None
) -> TensorPlan:
    """The plan for these options. Raises StrategyRefused.

    Args: uncut: where the model is cut in stages, if it is.
    """
    made = _planned(model, options, uncut)
    parted = _separated_pairs(made, model, options, uncut)
    made = replace(
        made,
        replicated={
            name: SEPARATED_MESSAGE if name in parted else why
            for name, why in made.replicated.items()
        },
    )
    if not made:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in made.replicated.items())
        raise StrategyRefused(
            f"tensor={options.degree}: nothing of this model can be cut, so every rank would hold "
            "and compute all of "
            f"it.\n{reasons}\n{PER_STAGE_MESSAGE if parted else ''}Use ddp, or zero3 for less memory."
        )
    if options.sequence and not (made.heads or made.multihead):
        raise StrategyRefused(
            f"tensor={options.degree},sequence=true: no attention of this model is cut, so nothing "
            "says that its "
            "stream is a sequence of tokens. Leave out sequence."
        )
    return made


def _planned(model: nn.Module, options: TensorParallel, uncut: FullModel | None) -> TensorPlan:
    problems: list[str] = []
    patterns = [pattern.strip() for pattern in options.whole.split("+") if pattern.strip()]
    keep = tuple(name for pattern in patterns for name in matching(model, pattern, problems))
    if problems:
        raise StrategyRefused("tensor: whole: " + "\n  ".join(problems))
    return plan(model, options.degree, keep, options.plan, uncut)


def _separated_pairs(
    made: TensorPlan, model: nn.Module, options: TensorParallel, uncut: FullModel | None
) -> set[str]:
    """What would be cut if the pipeline did not begin a stage inside a pair."""
    if uncut is None or NO_PAIR not in made.replicated.values():
        return set()
    one_stage = _planned(model, options, replace(uncut, begins=[]))
    return {
        name
        for name, why in made.replicated.items()
        if why == NO_PAIR and name in one_stage.is_sharded()
    }


def _gather_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """What leaves the model, or a stage of it."""
    return gather_all(output)


def describe(made: TensorPlan, sequence: bool = False) -> list[str]:
    """A plan in words; blocks that are alike in one line."""
    cuts: dict[str, list[str]] = {}
    for name, how in made.is_sharded().items():
        cuts.setdefault(how, []).append(name)
    said = [
        f"tensor={made.degree}: {how}: {_collapse_layer_numbers(names)}"
        for how, names in cuts.items()
    ]
    whole: dict[str, list[str]] = {}
    for name, why in made.replicated.items():
        whole.setdefault(why, []).append(name)
    if sequence:
        begin, end = made.boundaries()
        said.append(
            f"tensor={made.degree}: in slices of the sequence: the stream from "
            f"{_collapse_layer_numbers(begin)} to {_collapse_layer_numbers(end)}, in "
            "all that takes each token by itself; anything else gets it whole"
        )
    return said + [
        f"tensor={made.degree}: whole: {_collapse_layer_numbers(names)}: {why}"
        for why, names in whole.items()
    ]


def _collapse_layer_numbers(names: list[str]) -> str:
    """`blocks.0.mlp.up ... blocks.11.mlp.up` as `blocks.*.mlp.up (12)`."""
    patterns: dict[str, int] = {}
    for name in names:
        pattern = ".".join("*" if word.isdecimal() else word for word in name.split("."))
        patterns[pattern] = patterns.get(pattern, 0) + 1
    single = {
        ".".join("*" if w.isdecimal() else w for w in name.split(".")): name for name in names
    }
    return ", ".join(f"{p} ({count})" if count > 1 else single[p] for p, count in patterns.items())


class TensorParallelStep:
    """What the tensor group has to agree on."""

    def __init__(self, part: LocalModel, mesh: Mesh) -> None:
        self.part, self.axis, self.compared = part, mesh.tensor, False

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """A stop that one rank of the group was asked for is a stop of all, before the totals
        are summed.
        """
        outcome = self.part.forward(batch)
        if batch.is_last_microbatch and not self.part.pass_traits.complete_after_run:
            self.axis.all_reduce_max(outcome.step_totals[STOP])
        return outcome

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """The same for a pipeline, whose totals are known after all of its passes."""
        loss = self.part.run(forward, batch)
        if batch.is_last_microbatch and self.part.pass_traits.complete_after_run:
            self.axis.all_reduce_max(loss.step_totals[STOP])
        return loss

    def reduce(self) -> None:
        """In the first step, see whether what is whole has the same gradients on all ranks of
        the group.
        """
        self.part.reduce_gradients()
        if self.compared:
            return
        self.compared = True
        found = {
            n: p.grad
            for n, p in self.part.module.named_parameters()
            if p.grad is not None and not _is_cut(p)
        }
        sums = [_grad_checksum(gradient) for gradient in found.values()]
        if not sums:
            return
        sizes = torch.stack([_grad_checksum(gradient.abs()) for gradient in found.values()])
        mine = torch.nan_to_num(
            torch.stack(sums), nan=0.0, posinf=0.0, neginf=0.0
        )  # fp16 may overflow
        largest, smallest = self.axis.all_reduce_max(torch.stack((mine, -mine)))
        # A GPU's kernels may add in another order on each rank; a CPU's do not.
        allowed = torch.nan_to_num(sizes) * (0.0 if mine.device.type == "cpu" else 1e-4)
        apart = (largest + smallest > allowed).nonzero().flatten().tolist()
        if apart:
            names = [name for index, name in enumerate(found) if index in apart]
            raise StrategyRefused(
                f"{', '.join(names[:5])}: whole on every rank of the tensor group, but with other "
                "gradients on some. "
                "The model computes something else on each rank: random numbers that are not drawn "
                "from torch's "
                "generator, the rank, or the time. Make it a function of its inputs, or use ddp."
            )


def _is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "tensor" in (
        parameter.device_mesh.mesh_dim_names or ()
    )


def _grad_checksum(gradient: Any) -> Tensor:
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own.detach().double().sum() if own.numel() else own.new_zeros((), dtype=torch.float64)
