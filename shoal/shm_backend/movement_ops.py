"""The collectives that copy tensors from rank to rank, with the methods that torch.distributed
calls.

Each method first asks whether shared memory can carry the call, and leaves it to Gloo if not. Then
it flattens tensors, and gives the steps of `collectives.py` to `_run`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.platform.torch_private.c10d import ALL_GATHER_FLAT, Options
from shoal.shm_backend import collectives
from shoal.shm_backend.direct_forms import make_options, with_direct_forms
from shoal.shm_backend.dispatch import CollectiveDispatch
from shoal.shm_backend.native import LARGE_BYTES
from shoal.shm_backend.phase_board import Steps
from shoal.shm_backend.tensor_utils import flattened, flattened_rows, pairs, rows_of, split_for
from shoal.shm_backend.visible_calls import visible


class MovementOps(CollectiveDispatch):
    """broadcast, all_gather, gather, scatter, all_to_all."""

    @with_direct_forms(Options.BroadcastOptions, {"tensors": 1}, ("root", "timeout"))
    @visible("broadcast_")
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        if not self._takes(tensors, opts.rootRank) or not self._supports(tensors[0]):
            return self._fall_back_to_gloo("broadcast", tensors, tensors, opts)
        flat, root = flattened(tensors[0]), opts.rootRank
        return self._run(
            self._call("broadcast", flat, root=root),
            lambda: self._broadcast_steps(flat, root),
            tensors,
            (flat,),
            tensors,
            opts,
        )

    def _broadcast_steps(self, flat: Tensor, root: int) -> Steps:
        """Return the steps of a broadcast: compiled for a small tensor, else in Python."""
        if self._native_calls is not None and flat.nbytes < LARGE_BYTES:
            return self._native_calls.broadcast(flat, root)
        return collectives.broadcast(self._board, flat, root)

    @with_direct_forms(Options.AllgatherOptions, {"outputs": 2, "inputs": 1})
    @visible("allgather_")
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        if len(outputs) != 1 or len(inputs) != 1:
            return self._fall_back_to_gloo("allgather", inputs, outputs, inputs, opts)
        return self._all_gather(
            [outputs[0]], inputs, outputs[0], opts, "allgather", [(outputs, inputs, opts)]
        )

    @with_direct_forms(Options.AllgatherOptions, {"output": 0, "input": 0}, ())
    @visible("_allgather_base_")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        rows = rows_of(output, self.size())
        return self._all_gather(
            [rows], [tensor], [output], opts, ALL_GATHER_FLAT, [(output, tensor, opts)]
        )

    _allgather_base = all_gather_single

    @with_direct_forms(Options.AllgatherOptions, {"outputs": 1, "inputs": 1}, ())
    @visible("allgather_into_tensor_coalesced_")
    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Work:
        rows = [rows_of(output, self.size()) for output in outputs]
        return self._all_gather(
            rows,
            inputs,
            outputs,
            opts,
            ALL_GATHER_FLAT,
            [(o, i, opts) for o, i in pairs(outputs, inputs)],
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(
        self,
        rows: list[Sequence[Tensor]],
        inputs: list[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        gloo_name: str,
        gloo_calls: list[tuple[Any, ...]],
    ) -> Work:
        """Gather `inputs[i]` of all ranks into `rows[i]`, for all i in sequence.

        Args:
            results: the value of the call's future.
            gloo_name, gloo_calls: the method of Gloo, and the arguments of each of its calls, if
                shared memory cannot carry the calls.
        """
        if not all(
            self._supports(tensor) and self._all_same_size(tensor, r)
            for tensor, r in pairs(inputs, rows)
        ):
            return self._fall_back_each(gloo_name, inputs, gloo_calls)
        flats = [flattened(tensor) for tensor in inputs]
        flat_rows = [flattened_rows(group) for group in rows]
        return self._run_each(
            "all_gather",
            [
                (flat, partial(collectives.all_gather, self._board, flat, r))
                for flat, r in pairs(flats, flat_rows)
            ],
            [row for r in rows for row in r],
            [row for r in flat_rows for row in r],
            results,
            opts,
        )

    @with_direct_forms(Options.GatherOptions, {"outputs": 2, "inputs": 1}, ("root", "timeout"))
    @visible("gather_")
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        root = opts.rootRank
        is_root = root == self.rank()
        rows = list(outputs[0]) if is_root and outputs else []
        if (
            not self._takes(inputs, root)
            or len(outputs) != is_root
            or not self._supports(inputs[0])
            or (is_root and not self._all_same_size(inputs[0], rows))
        ):
            return self._fall_back_to_gloo("gather", inputs, outputs, inputs, opts)
        flat = flattened(inputs[0])
        flat_rows = [flattened(row) for row in rows]
        return self._run(
            self._call("gather", flat, root=root),
            lambda: collectives.all_gather(self._board, flat, flat_rows if is_root else None, root),
            rows,
            flat_rows,
            rows,
            opts,
        )

    @with_direct_forms(Options.ScatterOptions, {"outputs": 1, "inputs": 2}, ("root", "timeout"))
    @visible("scatter_")
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        root = opts.rootRank
        is_root = root == self.rank()
        if (
            not self._takes(outputs, root)
            or len(inputs) != is_root
            or not self._supports(outputs[0])
            or (is_root and not self._all_same_size(outputs[0], inputs[0]))
        ):
            return self._fall_back_to_gloo("scatter", outputs, outputs, inputs, opts)
        flat = flattened(outputs[0])
        rows = [flattened(row) for row in inputs[0]] if is_root else None
        return self._run(
            self._call("scatter", flat, root=root),
            lambda: collectives.scatter(self._board, flat, rows, root),
            outputs,
            (flat,),
            outputs,
            opts,
        )

    @with_direct_forms(Options.AllToAllOptions, {"outputs": 1, "inputs": 1}, ())
    @visible("alltoall_")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        return self._all_to_all(
            outputs, inputs, outputs, opts, "alltoall", [(outputs, inputs, opts)]
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        out_sizes: list[int],
        sizes: list[int],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> Work:
        if opts is None or isinstance(opts, timedelta):
            opts = make_options(Options.AllToAllOptions, {"timeout": opts or timeout})
        return self._all_to_all_single(output, tensor, out_sizes, sizes, opts)

    alltoall_base = all_to_all_single

    @visible("alltoall_base_")
    def _all_to_all_single(
        self, output: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int], opts: Any
    ) -> Work:
        args = (output, tensor, out_sizes, sizes, opts)
        rows = split_for(tensor, sizes, self.size())
        out_rows = split_for(output, out_sizes, self.size())
        return self._all_to_all(out_rows, rows, [output], opts, "alltoall_base", [args])

    def _all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        opts: Any,
        gloo_name: str,
        gloo_calls: list[tuple[Any, ...]],
    ) -> Work:
        """Send `inputs[r]` to rank r, and receive `outputs[r]` from it. Arguments as above."""
        if len(inputs) != self.size() or len(outputs) != self.size():
            raise ValueError(
                f"all_to_all takes one tensor for each of the {self.size()} ranks of the group, "
                f"not {len(inputs)} to send and {len(outputs)} to receive into"
            )
        if len({tensor.dtype for tensor in (*inputs, *outputs)}) != 1:
            raise ValueError("all_to_all takes tensors of one dtype, to send and to receive into")
        if not all(self._supports(tensor) for tensor in (*inputs, *outputs)):
            return self._fall_back_each(gloo_name, inputs, gloo_calls)
        flats = [flattened(output) for output in outputs]
        rows = [flattened(tensor) for tensor in inputs]
        # Ranks may differ in the length of rows, so the signature has the length 0.
        return self._run(
            self._call("all_to_all", rows[0][:0]),
            lambda: collectives.all_to_all(self._board, flats, rows),
            outputs,
            flats,
            results,
            opts,
            sum(row.nbytes for row in rows),
        )
