"""The collectives that reduce, with the methods that torch.distributed calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.platform.torch_private.c10d import REDUCE_SCATTER_FLAT, Options
from shoal.shm_backend import collectives, inter_host
from shoal.shm_backend.direct_forms import with_direct_forms
from shoal.shm_backend.dispatch import OPERATIONS, CollectiveDispatch
from shoal.shm_backend.native import CODES
from shoal.shm_backend.phase_board import Steps
from shoal.shm_backend.tensor_utils import (
    flattened,
    flattened_apart,
    flattened_rows,
    pairs,
    rows_of,
)
from shoal.shm_backend.visible_calls import visible


class Reductions(CollectiveDispatch):
    """all_reduce, reduce, reduce_scatter."""

    @with_direct_forms(Options.AllreduceOptions, {"tensors": 1}, ("op", "timeout"))
    @visible("allreduce_")
    def allreduce(self, tensors: Any, opts: Any) -> Work:
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if len(tensors) != 1 or not self._supports(tensors[0], operation, over_hosts=True):
            return self._fall_back_to_gloo("allreduce", tensors, tensors, opts)
        flat = flattened(tensors[0])
        call = self._call("all_reduce", flat, operation)
        return self._run(
            call, lambda: self._all_reduce(flat, operation), tensors, (flat,), tensors, opts
        )

    @with_direct_forms(Options.AllreduceCoalescedOptions, {"tensors": 1}, ())
    @visible("allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if not all(self._supports(tensor, operation, over_hosts=True) for tensor in tensors):
            return self._fall_back_to_gloo("allreduce_coalesced", tensors, tensors, opts)
        flats = flattened_apart(tensors)
        return self._run_each(
            "all_reduce",
            [(flat, partial(self._all_reduce, flat, operation)) for flat in flats],
            tensors,
            flats,
            tensors,
            opts,
            operation,
        )

    def _all_reduce(self, flat: Tensor, operation: str) -> Steps:
        """Return the steps of an all-reduce: compiled, in Python, or over several hosts."""
        if self._inter_host is None:
            code = CODES.get((flat.dtype, operation))
            if code is not None and self._native_calls is not None:
                return self._native_calls.all_reduce(flat, code)
            return collectives.all_reduce(self._board, flat, operation)
        return inter_host.all_reduce(self._board, self._inter_host, flat, operation)

    @with_direct_forms(Options.ReduceOptions, {"tensors": 1}, ("root", "op", "timeout"))
    @visible("reduce_")
    def reduce(self, tensors: Any, opts: Any) -> Work:
        operation, root = OPERATIONS.get(opts.reduceOp.op.value, ""), opts.rootRank
        if not self._takes(tensors, root) or not self._supports(tensors[0], operation):
            return self._fall_back_to_gloo("reduce", tensors, tensors, opts)
        flat = flattened(tensors[0])
        return self._run(
            self._call("reduce", flat, operation, root),
            lambda: collectives.reduce(self._board, flat, operation, root),
            tensors,
            (flat,),
            tensors,
            opts,
        )

    @with_direct_forms(Options.ReduceScatterOptions, {"outputs": 1, "inputs": 2}, ("op", "timeout"))
    @visible("reduce_scatter_")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        if len(outputs) != 1 or len(inputs) != 1:
            return self._fall_back_to_gloo("reduce_scatter", outputs, outputs, inputs, opts)
        return self._reduce_scatter(
            outputs, [inputs[0]], opts, "reduce_scatter", [(outputs, inputs, opts)]
        )

    @with_direct_forms(Options.ReduceScatterOptions, {"output": 0, "input": 0}, ())
    @visible("_reduce_scatter_base_")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        return self._reduce_scatter(
            [output],
            [rows_of(tensor, self.size())],
            opts,
            REDUCE_SCATTER_FLAT,
            [(output, tensor, opts)],
        )

    _reduce_scatter_base = reduce_scatter_single

    @with_direct_forms(Options.ReduceScatterOptions, {"outputs": 1, "inputs": 1}, ())
    @visible("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Work:
        rows = [rows_of(tensor, self.size()) for tensor in inputs]
        return self._reduce_scatter(
            outputs,
            rows,
            opts,
            REDUCE_SCATTER_FLAT,
            [(o, i, opts) for o, i in pairs(outputs, inputs)],
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self,
        outputs: list[Tensor],
        rows: list[Sequence[Tensor]],
        opts: Any,
        gloo_name: str,
        gloo_calls: list[tuple[Any, ...]],
    ) -> Work:
        """Reduce and scatter `rows[i]` into `outputs[i]`, for all i in sequence.

        Args: gloo_name, gloo_calls: the method of Gloo, and the arguments of each of its calls, if
            shared memory cannot carry the calls.
        """
        operation = OPERATIONS.get(opts.reduceOp.op.value, "")
        if not all(
            self._supports(output, operation) and self._all_same_size(output, r)
            for output, r in pairs(outputs, rows)
        ):
            return self._fall_back_each(gloo_name, outputs, gloo_calls)
        flats = [flattened(output) for output in outputs]
        flat_rows = [flattened_rows(group) for group in rows]
        return self._run_each(
            "reduce_scatter",
            [
                (flat, partial(collectives.reduce_scatter, self._board, flat, r, operation))
                for flat, r in pairs(flats, flat_rows)
            ],
            outputs,
            flats,
            outputs,
            opts,
            operation,
        )
