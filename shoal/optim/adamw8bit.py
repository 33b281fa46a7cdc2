"""AdamW with both moments in 8 bits: torchao's optimizer, with quantisation blocks that do not
depend on how a parameter is sharded.

    a row of a parameter   | 256 codes | 256 codes | 256 codes |   one byte for each value
                             scale       scale       scale         each block's largest magnitude,
                                                                   float32

torchao quantises the local shard if it has 4,096 values or more and consists of full blocks of 256.
So another number of ranks makes other blocks and other values (pytorch/ao#4912). Here a block stays
inside its row, and shards are full rows. So the moments have the same bits in every layout, and a
checkpoint of one layout is exact in any other. A block's length is the greatest divisor of a row's
length up to `block_size`. Rows without a divisor of at least 32, vectors and small parameters keep
full precision.

The codes (Dettmers et al., ICLR 2022) and the step in float32 are torchao's: pip install
'shoal[lean]'."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shoal.comm.norm import to_local
from shoal.errors import CheckpointError, ConfigError

SMALLEST_PARAMETER = 4096
SHORTEST_BLOCK = 32
"""One float32 scale for 32 bytes of codes adds an eighth."""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress torchao's warnings about GPU extensions that it cannot load and that are not
    used.
    """
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous_level)


try:
    with _without_warnings():
        from torchao.optim import AdamW8bit as _Torchao
except ImportError as error:
    raise ConfigError(
        f"AdamW8bit needs torchao ({error}). Try: pip install 'shoal[lean]'"
    ) from error


class AdamW8bit(_Torchao):
    """torchao.optim.AdamW8bit with the same arguments: lr, betas, eps, weight_decay, amsgrad,
    block_size, ...
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. On the CPU it is not compiled: torchao compiles one kernel for each shape,
        and each takes ten seconds.
        """
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            return super().step(closure)

    def block_length(self, shape: torch.Size) -> int | None:
        """Return the number of values that share a scale, in a parameter of this full shape; None
        where moments are not quantised.
        """
        row = math.prod(shape[1:])
        if math.prod(shape) < SMALLEST_PARAMETER:
            return None
        longest = max(n for n in range(1, min(self.block_size, row) + 1) if row % n == 0)
        return longest if longest >= SHORTEST_BLOCK else None

    def shard_state(self, parameter: Tensor, key: str, value: Tensor) -> dict[str, Tensor]:
        """Return a moment as plain tensors in the parameter's layout; {} where it is plain already.

        Returns:
            codes: uint8, in the parameter's shape.
            scale: float32 (rows, blocks in a row).
            map: float32 (256,), the value of each code before scaling.
        """
        length = self.block_length(parameter.shape)
        if value.dim() == 0 or length is None:
            return {}
        local: Any = to_local(value)
        blocks = math.prod(parameter.shape[1:]) // length
        sample = local
        if local.numel() == 0:  # this rank has no row of the parameter
            sample = self._subclass_zeros(parameter.new_empty(1, length), key == "exp_avg", length)
        codes = sample.codes.reshape(-1)[: local.numel()].view(local.shape)
        scale = sample.scale[: local.numel() // length].view(-1, blocks)
        return {
            "codes": _as_blocks(codes, parameter),
            "scale": _as_blocks(scale, parameter),
            "map": sample.qmap,
        }

    def unshard_state(self, parameter: Tensor, key: str, parts: dict[str, Tensor]) -> Tensor:
        """Return the moment from the tensors of `shard_state`, converted to this parameter's
        layout.

        Args: parts: the result of `shard_state`, or {"": tensor} for a moment that is not
            quantised.

        Raises: CheckpointError: the blocks or the map differ from this optimizer's, or the moment
            is not quantised where this optimizer quantises it."""
        length = self.block_length(parameter.shape)
        if "" in parts:
            if length is not None and parts[""].dim():
                raise CheckpointError(
                    f"the checkpoint holds '{key}' in full precision where this AdamW8bit has 8 "
                    "bits. Use the "
                    "optimizer and the block_size that it was saved with."
                )
            return parts[""]
        rows = parameter.shape[0]
        blocks = math.prod(parameter.shape[1:]) // (length or 1)
        if length is None or parts["scale"].shape != (rows, blocks):
            raise CheckpointError(
                f"the checkpoint holds '{key}' in {parts['scale'].shape[1]} blocks of 8 bits a row "
                "where this "
                f"optimizer has {blocks if length else 'none'}. Use the block_size that it was "
                "saved with."
            )
        moment = self._new_buffer(parameter, key == "exp_avg")
        local: Any = to_local(moment)
        if local.numel():
            if not torch.equal(local.qmap.cpu(), parts["map"].cpu()):
                raise CheckpointError(
                    "the checkpoint's 8-bit codes stand for other numbers than those of this "
                    "torchao; use the version "
                    "that saved it."
                )
            local.codes.copy_(_local_rows(parts["codes"], parameter))
            local.scale.copy_(_local_rows(parts["scale"], parameter).reshape(-1))
        return moment

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Return zeros for one moment of `p`. torchao's own rule depends on the local shard."""
        shard = to_local(p)
        length = self.block_length(p.shape)
        if length is None or shard.numel() == 0:
            return torch.zeros_like(p)
        zeros: Tensor = self._subclass_zeros(shard, signed, length)
        return _as_blocks(zeros, p)


def _as_blocks(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's rows as a tensor in the layout of the parameter, replicated or sharded by
    rows.
    """
    if not isinstance(parameter, DTensor):
        return shard
    shape = torch.Size([parameter.shape[0], *shard.shape[1:]])
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh, placements = parameter.device_mesh, parameter.placements
    assert all(
        isinstance(placement, Replicate) or placement == Shard(0) for placement in placements
    ), placements
    sharded = DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return sharded.to(parameter.device)


def _local_rows(value: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's rows of `value`, which is full or in the parameter's layout."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return to_local(value)
