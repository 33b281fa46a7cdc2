"""Weights of ranks that hold the same part of a model: equal to the last bit.

      model.head.reset_parameters()      each data rank draws other numbers
      if run.rank == 0: load(...)        one rank alone has the file
      p.grad = gradient of own rows      each rank steps by another one

Nothing would bring such weights together again: means of gradients keep their distance.
"""

from __future__ import annotations

from shoal.comm.norm import to_local
from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.run.guards.guarded_models import GuardedModels
from shoal.run.replica_check import find_differences, replicated_tensors


def check_equal_weights(guarded: GuardedModels) -> None:
    """Compare the weights of ranks that hold the same. Collective over the data axis.

    Weights that are not finite on some rank are left to the checks that look for these.

    Raises: UsageError: on every rank of the data axis, a weight differs.
    """
    model, data = guarded.local_model, guarded.mesh.data
    if data.size == 1 or model.remote_optimizer is not None:
        return
    held = replicated_tensors(model, (), guarded.mesh)
    differences = find_differences(held, data)
    if differences:
        is_finite = all(bool(to_local(entry.value).isfinite().all()) for entry in held)
        if not data.sum_of_host_numbers([not is_finite])[0]:
            name, (first, other, *_) = differences[0]
            raise UsageError(_describe(name, first[0], other[0]))


def _describe(name: str, first: int, other: int) -> str:
    return (
        f"{name} has other values on data rank {other} than on data rank {first}, noticed"
        f"{call_site() or ' now'}: the script has written it on one of them, or differently on "
        "each. Draw weights anew under one seed, torch.manual_seed(epoch) on all ranks, for after "
        "run.prepare torch draws other numbers on each data rank; load weights on all ranks; and "
        "take gradients from run.forward_backward alone."
    )
