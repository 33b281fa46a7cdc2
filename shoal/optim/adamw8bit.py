"""AdamW with both moments in 8 bits: torchao's, cut into blocks that do not depend on how a
parameter is sharded.

      a row of a parameter   | 256 codes | 256 codes | 256 codes |   one byte a value; one float32 for
                               scale       scale       scale         each block: its largest magnitude

torchao quantises what a rank holds, if that is 4,096 numbers and whole blocks of 256: another
number of ranks makes other blocks, and other numbers (pytorch/ao#4912). Here a block never leaves
its row. Shards are whole rows, so the moments are the same bits in every layout, and a checkpoint
of one is exact in any other. A block is the longest divisor of a row's length up to `block_size`;
rows without one of at least 32, vectors and small parameters keep full precision.

The rest, the codes (Dettmers et al., ICLR 2022) and the step in float32, is torchao's: pip install
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
"""A float32 scale for 32 bytes of codes: an eighth more."""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torchao warns of extensions for GPUs that it cannot load; nothing here uses them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


try:
    with _without_warnings():
        from torchao.optim import AdamW8bit as _Torchao
except ImportError as error:
    raise ConfigError(
        [f"AdamW8bit needs torchao ({error}). Try: pip install 'shoal[lean]'"]
    ) from error


class AdamW8bit(_Torchao):
    """Arguments are those of torchao.optim.AdamW8bit: lr, betas, eps, weight_decay, amsgrad,
    block_size, ...
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Uncompiled on the CPU, where torchao's kernels, one a shape, take ten
        seconds each to compile.
        """
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            return super().step(closure)

    def block_length(self, shape: torch.Size) -> int | None:
        """Numbers that share a scale, in a parameter of this whole shape; None where moments
        are not quantised.
        """
        row = math.prod(shape[1:])
        if math.prod(shape) < SMALLEST_PARAMETER:
            return None
        longest = max(n for n in range(1, min(self.block_size, row) + 1) if row % n == 0)
        return longest if longest >= SHORTEST_BLOCK else None

    def shard_state(self, parameter: Tensor, key: str, value: Tensor) -> dict[str, Tensor]:
        """A moment as tensors of plain kinds, in the parameter's layout; {} where it is one
        already.

        Returns: codes, uint8 in the parameter's shape; scale, float32 (rows, blocks in a row); map,
            float32 (256,), the numbers that the codes stand for, before they are scaled.
        """
        length = self.block_length(parameter.shape)
        if value.dim() == 0 or length is None:
            return {}
        held: Any = to_local(value)
        blocks = math.prod(parameter.shape[1:]) // length
        sample = held
        if held.numel() == 0:  # this rank has no row of it
            sample = self._subclass_zeros(parameter.new_empty(1, length), key == "exp_avg", length)
        codes = sample.codes.reshape(-1)[: held.numel()].view(held.shape)
        scale = sample.scale[: held.numel() // length].view(-1, blocks)
        return {
            "codes": _as_blocks(codes, parameter),
            "scale": _as_blocks(scale, parameter),
            "map": sample.qmap,
        }

    def unshard_state(self, parameter: Tensor, key: str, parts: dict[str, Tensor]) -> Tensor:
        """The inverse of `taken_apart`, in this parameter's layout, whatever that of the parts was.

        Args: parts: what `taken_apart` gave, or a tensor that is whole as "".

        Raises: CheckpointError: other blocks, or another map, than this optimizer's; no blocks
        where it has some."""
        length = self.block_length(parameter.shape)
        if "" in parts:
            if length is not None and parts[""].dim():
                raise CheckpointError(
                    f"the checkpoint holds '{key}' in full precision where this AdamW8bit has 8 "
                    "bits. Use the "
                    "optimizer and the block_size that it was saved with."
                )
            return parts[""]
        rows, blocks = parameter.shape[0], math.prod(parameter.shape[1:]) // (length or 1)
        if length is None or parts["scale"].shape != (rows, blocks):
            raise CheckpointError(
                f"the checkpoint holds '{key}' in {parts['scale'].shape[1]} blocks of 8 bits a row "
                "where this "
                f"optimizer has {blocks if length else 'none'}. Use the block_size that it was "
                "saved with."
            )
        made = self._new_buffer(parameter, key == "exp_avg")
        held: Any = to_local(made)
        if held.numel():
            if not torch.equal(held.qmap.cpu(), parts["map"].cpu()):
                raise CheckpointError(
                    "the checkpoint's 8-bit codes stand for other numbers than those of this "
                    "torchao; use the version "
                    "that saved it."
                )
            held.codes.copy_(_share(parts["codes"], parameter))
            held.scale.copy_(_share(parts["scale"], parameter).reshape(-1))
        return made

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Zeros for one moment of `p`: torchao's own rule looks at the shard that a rank holds."""
        shard, length = to_local(p), self.block_length(p.shape)
        if length is None or shard.numel() == 0:
            return torch.zeros_like(p)
        zeros: Tensor = self._subclass_zeros(shard, signed, length)
        return _as_blocks(zeros, p)


def _as_blocks(shard: Tensor, parameter: Tensor) -> Tensor:
    """This rank's rows as a tensor of the parameter's layout, which is sharded by rows if at
    all.
    """
    if not isinstance(parameter, DTensor):
        return shard
    shape = torch.Size([parameter.shape[0], *shard.shape[1:]])
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    mesh, placements = parameter.device_mesh, parameter.placements
    assert all(
        isinstance(placement, Replicate) or placement == Shard(0) for placement in placements
    ), placements
    made = DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
    return made.to(parameter.device)


def _share(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's rows of `value`, which is whole or in the parameter's layout."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return to_local(value)
