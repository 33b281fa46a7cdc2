"""The verdict on models that a loop calls: does a sample's output follow from that sample alone?

    for x, y in loader:
        output = model(x)                              may mix samples: a norm over the batch
        run.backward(F.cross_entropy(output, y))       a mean, whatever the model has done

A function of one sample's output is a mean over samples if the model does not mix them, so
`try_loss` judges it, as it judges the loss that a run is given as a function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.data.tree_map import tensors_in
from shoal.platform.autograd_graph import nodes_behind
from shoal.platform.torch_private.pytree import tree_map
from shoal.strategies.loss_terms import Counted
from shoal.trial.judge_loss import TOLERANCE, try_loss
from shoal.trial.loss_verdict import CannotTry, LossKind, LossVerdict

MOST_NODES = 10_000
"""Nodes of the graph of a loss that are looked at."""


class ModelCall(NamedTuple):
    """A call of a model, and what it has returned.

    Attributes:
        used: numbers of the outputs that a loss was computed from.
        kept: modules of the model and their attributes, numbers that the call has left there and
            that a loss was computed from, such as a balance of experts.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    used: Sequence[int] = ()
    kept: Sequence[tuple[nn.Module, str]] = ()


def calls_behind(loss: Tensor | Counted, calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls of which a loss uses an output, or a number that a module keeps."""
    means = [loss] if isinstance(loss, Tensor) else [term.value for term in loss.terms]
    nodes = {*islice(nodes_behind(mean.grad_fn for mean in means), MOST_NODES)}
    behind = []
    for call in calls:
        outputs = enumerate(tensors_in(call.output))
        used = [i for i, t in outputs if t.is_floating_point() and t.grad_fn in nodes]
        kept = [place for place, number in _kept_numbers(call.model) if number.grad_fn in nodes]
        behind += [call._replace(used=used, kept=kept)] if used or kept else []
    return behind


def _kept_numbers(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    """Yield the tensors of one number in attributes of modules, each with its place."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.dim() and value.grad_fn is not None:
                yield (module, name), value


def try_calls(
    calls: Sequence[ModelCall], num_samples: int, models: Sequence[nn.Module]
) -> LossVerdict:
    """Judge calls on all samples of a rank by their used outputs.

    A number that a model returns may be a mean or a sum over samples: it is judged by itself.

    Returns: the first verdict of samples that influence one another, or else a mean.
    """
    for call in calls:
        # Another pass would free the graph of what the loop has computed before this call.
        args, kwargs = tree_map(_detached, (call.args, dict(call.kwargs)))
        call, extra = call._replace(args=args, kwargs=kwargs), list[nn.Module]()
        if not any(p.requires_grad for p in call.model.parameters()):
            extra = [InputShift(call.model)]
            call = call._replace(model=extra[0])
        tensors = [t for t in tensors_in([call.args, dict(call.kwargs)]) if t.dim()]
        if not tensors or not all(num_samples in t.shape[:2] for t in tensors):
            continue  # something that the model was given has no row for each sample
        outputs = [*tensors_in(call.output)]
        rows = [i for i in call.used if num_samples in outputs[i].shape[:2]]
        numbers = [i for i in call.used if not outputs[i].dim()]
        sizes = {i: outputs[i].numel() / num_samples for i in rows}
        chosen = [*([rows] if rows else ()), *([number] for number in numbers)]
        functions = [_mean_of_outputs(call, each, sizes) for each in chosen]
        for function in [*functions, *(_kept_number(call, *place) for place in call.kept)]:
            given = call.args, dict(call.kwargs), torch.arange(num_samples)
            verdict = try_loss(function, given, {}, num_samples, [*models, *extra])
            # What fails on parts may do so for another reason: where others differ, it mixes too.
            if verdict.kind in _MIXING and verdict.difference >= TOLERANCE:
                return verdict
    return LossVerdict(LossKind.MEAN)


_MIXING = {LossKind.COUPLED, LossKind.FAILS_ON_PARTS}


class InputShift(nn.Module):
    """A module without weights, called with x + amount * sin(x). The gradient of `amount`, which is
    0, tells whether the module mixes samples.

    A scale or an offset of x would have no gradient in front of a norm over the batch.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.amount = module, nn.Parameter(torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with inputs that `amount` changes."""
        args, kwargs = tree_map(self._shifted, (args, kwargs))
        return self.module(*args, **kwargs)

    def _shifted(self, value: Any) -> Any:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return value + self.amount.to(value) * value.sin() if is_floating else value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _kept_number(call: ModelCall, module: nn.Module, name: str) -> Any:
    """Return a function of (args, kwargs, rows): a number that a call leaves in a module."""

    def compute(args: Any, kwargs: Any, rows: Tensor) -> Any:
        call.model(*args, **kwargs)
        return getattr(module, name)

    return compute


def _mean_of_outputs(call: ModelCall, chosen: Sequence[int], sizes: Mapping[int, float]) -> Any:
    """Return a function of (args, kwargs, rows): a mean over samples of each one's outputs.

    Args:
        chosen: numbers of the outputs.
        sizes: how many numbers a sample has in each; without those that are numbers themselves.
    """

    def compute(args: Any, kwargs: Any, rows: Tensor) -> Any:
        outputs = [*tensors_in(call.model(*args, **kwargs))]
        total: Any = 0
        for index in chosen:
            output, size = outputs[index], sizes.get(index)
            if size is not None and output.numel() != size * len(rows):
                raise CannotTry("outputs that are padded to the longest")
            # Unlike the mean of outputs, that of this is nothing that a norm keeps constant.
            total = total + (output if size is None else torch.asinh(output + 1).mean())
        return total

    return compute
