"""Exact evaluation at any number of ranks: every sample once, the same sums to the last bit.

The values of all batches, sums or predictions, are put into the order of the data set.

      batch     0   1   2   3   4   5   6       fixed batches of the data set in its own order;
      rank      0   1   2   0   1   2   0       ranks take them in turn, without padding

The sums of a batch depend on that batch alone, and every rank adds up those of all batches in the
same order. So the result does not depend on which rank has computed which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.comm.axis import Axis
from shoal.comm.row_collectives import gather_rows
from shoal.data.fingerprint import fingerprint
from shoal.data.loader import EvaluationBatches
from shoal.errors import UsageError
from shoal.run.preparation import check_same_data
from shoal.strategies.base import NEEDS_NOTHING, LocalModel
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress

WITHOUT_NAME = ""
"""Name of a tensor that `compute` returns by itself."""
ComputeSums = Callable[..., dict[str, Tensor]]
"""(*batch) -> name -> scalar sum over the batch; `samples` is added if it is missing."""
_compared = WeakSet[DataLoader]()
"""Loaders whose data sets ranks have compared."""


class OneEvaluation(NamedTuple):
    """The ranks and models of one pass over a data set.

    Args:
        data: the ranks that take batches in turn.
        loader: a DataLoader or another source of batches.
        models: are in evaluation mode meanwhile. Rank 0's buffers are broadcast first.
        to_device: moves a batch to the device of this rank.
        local_model: of the prepared models; None if there are none.
    """

    data: Axis
    loader: Any
    models: Sequence[nn.Module]
    to_device: Callable[[Any], Any]
    local_model: LocalModel | None

    def evaluate(self, compute_sums: ComputeSums) -> dict[str, float]:
        """Sum values over every sample of a data set. Collective over `data`.

        Sums are float64.

        Returns: name -> sum over all samples.

        Raises: UsageError: the loader gives no batches; a value is no sum.
        """
        sums = self._compute(compute_sums, _sums, "evaluate: compute_sums")
        return {name: float(of_batches.sum()) for name, of_batches in sums.items()}

    def predict(self, compute: Callable[..., Any]) -> Any:
        """Return the values of every sample of a data set, in its order. Collective over `data`.

        Args: compute: (*batch) -> a tensor, or name -> tensor, with a row for each sample.

        Returns: the same of all samples, on the CPU, equal on every rank.

        Raises:
            UsageError: the loader gives no batches; a value has not one row for each sample, or
                rows of another shape than in the first batch.
        """
        call = "predict: compute"
        gathered = self._compute(compute, partial(_rows_of_samples, call), call)
        return gathered.get(WITHOUT_NAME, gathered)

    def measure(self, compute: Callable[..., Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what metrics say of every sample of a data set. Collective over `data`.

        Each rank gives every metric the values of all samples, in their order.

        Args:
            compute: (*batch) -> what `update` of each metric takes: tensors with a row for each
                sample, in a tuple or by name.
            metrics: name -> an object with `reset`, `update` and `compute`, as of torchmetrics.

        Returns: name -> what its `compute` returns.

        Raises: UsageError: as `predict`.
        """
        call = "evaluate: compute_sums, with metrics,"

        def read(values: Any, rows: int) -> dict[str, Tensor]:
            if isinstance(values, (tuple, list)):
                values = {str(index): value for index, value in enumerate(values)}
            return _rows_of_samples(call, values, rows)

        gathered = self._compute(compute, read, call)
        places = {name for name in gathered if name.isdigit() or name == WITHOUT_NAME}
        by_place = [value for name, value in gathered.items() if name in places]
        by_name = {name: value for name, value in gathered.items() if name not in places}
        return {name: _measured(each, by_place, by_name) for name, each in metrics.items()}

    def _compute(
        self, function: Callable[..., Any], read: Callable[[Any, int], dict[str, Tensor]], name: str
    ) -> dict[str, Tensor]:
        """Call a function on this rank's batches. Return the rows of all batches, by name.

        Args:
            read: takes what it returned and the number of samples; makes rows of it.
            name: of the function, for messages.
        """
        data, model = self.data, self.local_model
        loader = self.loader
        if data.size > 1 and isinstance(loader, DataLoader) and loader not in _compared:
            _compared.add(loader)  # once: later a data set may keep what this rank has read of it
            facts = [fingerprint(loader.dataset), fingerprint(loader.sampler)]
            check_same_data(name.partition(":")[0], loader.dataset, facts, data)
        outside_step, joins = NEEDS_NOTHING, False
        if model is not None:
            model.strategy_state.synchronize()
            # Some ranks have one batch less. Where a forward pass is collective they join the last
            # one all the same, with a batch that is not counted.
            outside_step, joins = model.outside_step, model.pass_traits.collective_forward
        call = partial(outside_step.call, function)
        values: list[dict[str, Tensor]] = []
        progress = own_progress()
        try:
            for each in self.models if model is None else [model.module]:
                data.broadcast_buffers(each)
            batches = EvaluationBatches(self.loader, data.rank, data.size, joins)
            with _evaluation_mode(self.models), torch.no_grad(), progress.during(Phase.EVALUATION):
                for item in batches:
                    progress.enter(Phase.EVALUATION)
                    value = read(_call(call, self.to_device(item.batch)), item.rows)
                    values += [value] if item.is_counted else []
        finally:
            outside_step.reshard()
        return _gather_parts(data, values, batches.total, name)


def _measured(metric: Any, values: Sequence[Tensor], named: Mapping[str, Tensor]) -> Any:
    device = getattr(metric, "device", torch.device("cpu"))
    metric.reset()
    metric.update(
        *(value.to(device) for value in values),
        **{name: value.to(device) for name, value in named.items()},
    )
    # A metric of torchmetrics would add up the ranks, each of which has all samples.
    is_shared = getattr(metric, "distributed_available_fn", None)
    if is_shared is not None:
        metric.distributed_available_fn = bool  # returns False
    try:
        return metric.compute()
    finally:
        if is_shared is not None:
            metric.distributed_available_fn = is_shared


def _call(function: Callable[..., Any], batch: Any) -> Any:
    """Call the user's function on a batch."""
    if isinstance(batch, Mapping):
        return function(**batch)
    return function(*batch) if isinstance(batch, (tuple, list)) else function(batch)


def _sums(sums: Any, rows: int) -> dict[str, Tensor]:
    """Return the sums of a batch, its samples among them, each (1,) in float64.

    Raises: UsageError: it is something else than a dict of scalars.
    """
    if not isinstance(sums, Mapping):
        raise UsageError(
            f"evaluate: compute_sums returned a {type(sums).__name__}; it must return a dict of "
            'sums over its batch, such as {"correct": (scores.argmax(1) == y).sum()}.'
        )
    named = {"samples": _sum("samples", float(rows))}
    for name, value in sums.items():
        if not isinstance(name, str):
            raise UsageError(f"evaluate: compute_sums named a sum {name!r}; a name is a text.")
        named[name] = _sum(name, value)
    return {name: value.detach().double().reshape(1) for name, value in named.items()}


def _sum(name: str, value: Any) -> Tensor:
    if isinstance(value, bool | int | float):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise UsageError(
            f"evaluate: compute_sums returned a {type(value).__name__} as {name!r}; it must be one "
            "number, the sum over the batch."
        )
    return value


def _rows_of_samples(call: str, values: Any, rows: int) -> dict[str, Tensor]:
    """Return the values of a batch by name, on the CPU.

    Raises: UsageError: it is no tensor or dict of tensors, or has not `rows` rows.
    """
    named = values if isinstance(values, Mapping) else {WITHOUT_NAME: values}
    if not named:
        raise UsageError(f"{call} returned an empty dict; it must return a tensor by name.")
    for name, value in named.items():
        what = f"{call} returned a {type(value).__name__}" + f" as {name!r}" * bool(name)
        if not isinstance(value, Tensor) or not isinstance(name, str):
            raise UsageError(f"{what}; it must return a tensor, or a dict of tensors by name.")
        if value.shape[:1] != (rows,):
            raise UsageError(
                f"{what} of shape {tuple(value.shape)} for a batch of {rows} samples; it must have "
                "a row for each of them."
            )
    return {name: value.detach().cpu() for name, value in named.items()}


def _gather_parts(
    data: Axis, parts: list[dict[str, Tensor]], batches: int, function: str
) -> dict[str, Tensor]:
    """Return the rows of all batches by name, in the order of batches, on the CPU. Collective.

    Args:
        parts: of this rank's batches.
        batches: number of batches of all ranks.
        function: that has made them, for messages.
    """
    # Rank 0 always has a batch. Other ranks may have none, and then do not know names and shapes.
    first = [[k, str(v.dtype), list(v.shape[1:])] for k, v in parts[0].items()] if parts else []
    forms = data.broadcast_json(first)
    counts = torch.zeros(batches, dtype=torch.int64)
    for index, part in enumerate(parts):
        given = [[name, str(value.dtype), list(value.shape[1:])] for name, value in part.items()]
        if given != forms:
            raise UsageError(
                f"{function} returned {_shown_forms(given)} for one batch, and "
                f"{_shown_forms(forms)} for the first one. Return the same names each time, and "
                "rows of one shape: pad them, or return what you compute of them."
            )
        counts[data.rank + index * data.size] = len(next(iter(part.values())))
    counts = data.all_reduce(counts.to(data.device)).cpu()
    # Rank after rank, each with the batches that it took in turn.
    numbers = [n for rank in range(data.size) for n in range(rank, batches, data.size)]
    of_ranks = [int(counts[rank :: data.size].sum()) for rank in range(data.size)]
    order = sorted(range(batches), key=numbers.__getitem__)
    whole: dict[str, Tensor] = {}
    for name, dtype, shape in forms:
        empty = torch.empty(0, *shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        own = torch.cat([part[name] for part in parts] or [empty]).to(data.device)
        pieces = gather_rows(own, data, of_ranks).cpu().split(counts[numbers].tolist())
        whole[name] = torch.cat([pieces[index] for index in order])
    return whole


def _shown_forms(forms: list[list[Any]]) -> str:
    return ", ".join(
        f"{name} {dtype} (rows, {str(shape)[1:-1]})".strip() for name, dtype, shape in forms
    )


@contextmanager
def _evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put models into evaluation mode, and every module back into the mode that it was in.

    `model.train()` afterwards would not do: a user may keep some BatchNorm layers frozen.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
