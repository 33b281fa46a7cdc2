"""Numbers read out of a sum over shards: an error, where torch gives this rank's part of it.

p.grad.norm()              a DTensor: each rank has the norm of its shard
p.grad.norm().sqrt()       torch combines the parts
p.grad.norm().item()       torch returns this rank's part
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from shoal.errors import UsageError
from shoal.platform.torch_private.replaced_functions import watch_numbers
from shoal.run.guards.call_site import call_site
from shoal.run.guards.guarded_models import GuardedModels, Removable
from shoal.run.guards.process_wide import ProcessWidePatch


def guard_partial_numbers(guarded: GuardedModels) -> Iterator[Removable]:
    """Refuse to read numbers of which this rank has a part, if parameters are shards."""
    if guarded.local_model.has_sharded_params:
        yield _numbers.add(guarded)


def _check(tensor: DTensor) -> None:
    if any(placement.is_partial() or placement.is_shard() for placement in tensor.placements):
        raise UsageError(
            f"item(){call_site()}: this rank has its part of this number only, that of its shards. "
            "Use x.full_tensor().item() on all ranks; for the norm of all gradients "
            "run.clip_gradients(max_norm) or torch.nn.utils.clip_grad_norm_, for whole ones "
            "run.gradients()."
        )


def _install(_: ProcessWidePatch) -> Any:
    return watch_numbers(_check)


_numbers = ProcessWidePatch(_install)
