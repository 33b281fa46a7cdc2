"""Checks of private names about ranks: groups, sharded tensors, pipelines and data workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import active_children
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shoal.platform.torch_private.data_workers import (
    set_worker_info,
    without_default_group,
)
from shoal.platform.torch_private.subclasses import DISABLED_TORCH_FUNCTION
from shoal.testing import world


def _watches_numbers() -> bool:
    from shoal.platform.torch_private.replaced_functions import watch_numbers

    seen: list[DTensor] = []
    end = watch_numbers(seen.append)
    tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    read = float(tensor.sum())
    end()
    tensor.sum().item()
    return read == 2.0 and len(seen) == 1


def _answers_for_shards() -> bool:
    from shoal.platform.torch_private.replaced_functions import answer_for_shards

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func.__name__)
        return func(*args, **kwargs)

    seen: list[str] = []
    shard = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    end = answer_for_shards(call)
    result = torch.ones(()) * shard.add_(1)
    nn.functional.mse_loss(shard, shard)
    end()
    shard.add_(1)
    return isinstance(result, DTensor) and seen == ["add_", "mul", "mse_loss"]


def _default_store() -> bool:
    from shoal.platform.torch_private.c10d import default_store

    default_store().set("said", "here")
    dist.barrier()
    return default_store().get("said") == b"here"


def _make_gloo() -> bool:
    from shoal.platform.torch_private.c10d import default_store, make_gloo

    values = []
    for address in ("", "127.0.0.1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOAL_ADDRESS", address)
            store = dist.PrefixStore(f"gloo at {address}", default_store())
            gloo: Any = make_gloo(store, dist.get_rank(), 2, timedelta(seconds=30))
        value = torch.ones(1)
        gloo.allreduce([value]).wait()
        values.append(float(value))
    return values == [2.0, 2.0] and gloo.options._timeout == timedelta(seconds=30)


def _process_groups() -> bool:
    from shoal.platform.torch_private.c10d import process_groups

    made = dist.new_group(backend="gloo")
    return process_groups() == [dist.group.WORLD, made]


def _backend_for() -> bool:
    from shoal.platform.torch_private.c10d import backend_for

    group = dist.new_group(backend="gloo")
    return isinstance(backend_for(group, torch.device("cpu")), dist.ProcessGroupGloo)


def _add_backend() -> bool:
    from shoal.platform.torch_private.c10d import add_backend, backend_for

    gloo = backend_for(dist.new_group(backend="gloo"), torch.device("cpu"))
    group = dist.ProcessGroup(dist.get_rank(), 2)
    add_backend(group, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    total = torch.ones(1)
    group.allreduce([total]).wait()
    group.barrier().wait()
    return backend_for(group, torch.device("cpu")) is gloo and total.item() == 2.0


class _OneOrTwo(nn.Module):
    """Uses its second layer if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found: Tensor = self.first(x)
        return found + self.second(x) if both else found


def _check_reducer_finalized() -> bool:
    from shoal.platform.torch_private.c10d import check_reducer_finalized

    engine = DistributedDataParallel(_OneOrTwo(), process_group=dist.new_group(backend="gloo"))
    engine(torch.ones(1, 1), True).sum().backward()
    check_reducer_finalized(engine)
    engine(torch.ones(1, 1), False).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank \d: 2 3"):
        check_reducer_finalized(engine)
    return True


def _runs_a_unit_without_calling_it() -> bool:
    from shoal.platform.torch_private.fsdp import post_forward, pre_forward

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    named = pre_forward(model[0], {"named": 1})
    gathered = not isinstance(model[0].weight, DTensor)
    post_forward(model[0], None)
    return named == {"named": 1} and gathered and isinstance(model[0].weight, DTensor)


def _is_gathered_until_reset() -> bool:
    from shoal.platform.torch_private.fsdp import is_gathered, pre_forward, reset_after_error

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    before = is_gathered(model[0])
    pre_forward(model[0], {})
    during = is_gathered(model[0])
    reset_after_error(model)
    return (before, during, is_gathered(model[0])) == (False, True, False)


def _cuts_in_strides(placement: Any) -> bool:
    made = placement(0, split_factor=2)
    return (made.dim, made.split_factor) == (0, 2) and all(world.run(4, _whole_of_strides))


def _whole_of_strides() -> bool:
    """Put together rows 0 to 3, which were cut by two ranks and then by two more."""
    from torch.distributed.tensor import Shard

    from shoal.platform.torch_private.fsdp import StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    shard, tensor = mesh.get_coordinate() or (0, 0)
    own = torch.tensor([[float(2 * tensor + shard)]])
    placements = [StridedShard(0, split_factor=2), Shard(0)]
    made = DTensor.from_local(own, mesh, placements, run_check=False)
    return made.full_tensor().flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def _halves(_: Any) -> bool:
    from shoal.platform.torch_private.pipelining import stage_backward_input
    from shoal.strategies.pipeline.engine import add_weight_gradients

    layer, x = nn.Linear(2, 2).double(), torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    expected = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = layer.bias.grad = None
    (of_x,), groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    nothing_yet = layer.weight.grad is None
    add_weight_gradients(groups)
    found = of_x, layer.weight.grad
    return nothing_yet and all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


class _Renumbered(IterableDataset):
    """Gives the number of the worker, and the data set, that it is told after a replacement."""

    def __iter__(self) -> Iterator[Any]:
        set_worker_info(7, 9, 0, "the user's")
        info = get_worker_info()
        assert info is not None
        yield info.id, info.num_workers, info.dataset


def _replaces_worker_info(_: Any) -> bool:
    found = next(iter(DataLoader(_Renumbered(), None, num_workers=1)))
    return list(found) == [7, 9, "the user's"]


def _meets_by_another_function(replace_rendezvous: Any) -> bool:
    """Meet at a URL by a function that is given in place of torch's, and put that back."""
    originals: list[Any] = []

    def meets(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        yield url, 5, 7

    replace_rendezvous("tcp", lambda original: originals.append(original) or meets)
    try:
        found = next(iter(dist.rendezvous("tcp://127.0.0.1:1", 0, 2, timeout=timedelta(1))))
    finally:
        replace_rendezvous("tcp", lambda _: originals[0])
    return found == ("tcp://127.0.0.1:1?rank=0&world_size=2", 5, 7)


def _hides_group() -> bool:
    with without_default_group():
        hidden = not dist.is_initialized()
    return hidden and dist.get_world_size() == 2


def _over(ranks: int, function: Callable[[], bool]) -> Callable[[Any], bool]:
    return lambda _: all(world.run(ranks, _to_the_end, function))


def _to_the_end(function: Callable[[], bool]) -> bool:
    """Return what the function does, when the other ranks have it too.

    A rank that ends while another still connects a new group makes that one fail.
    """
    holds = function()
    if dist.is_initialized():
        dist.barrier()
    return holds


def _ends_workers(end: Callable[[Any], None]) -> bool:
    iterator = iter(DataLoader(torch.ones(2), num_workers=1))
    begun = len(active_children())
    end(iterator)
    end(iter(DataLoader(torch.ones(2))))  # in this process
    return begun - len(active_children()) == 1


CHECKS: dict[str, Callable[[Any], bool]] = {
    "data_workers.end_workers": _ends_workers,
    "data_workers.set_worker_info": _replaces_worker_info,
    "data_workers.without_default_group": _over(2, _hides_group),
    "c10d.replace_rendezvous": _meets_by_another_function,
    "replaced_functions._READ_NUMBER": lambda found: (
        str(found) == "aten._local_scalar_dense.default"
    ),
    "replaced_functions._ANSWER": lambda name: DTensor.__dict__[name] is DISABLED_TORCH_FUNCTION,
    "replaced_functions.answer_for_shards": _over(1, _answers_for_shards),
    "replaced_functions.watch_numbers": _over(1, _watches_numbers),
    "c10d.GradBucket": lambda found: found is dist.GradBucket,  # type: ignore[attr-defined]
    "c10d.Options": lambda found: all(
        hasattr(found, f"{name}Options") for name in ("Barrier", "AllreduceCoalesced", "Allgather")
    ),
    "c10d.default_store": _over(2, _default_store),
    "c10d.make_gloo": _over(2, _make_gloo),
    "c10d.process_groups": _over(2, _process_groups),
    "c10d.backend_for": _over(2, _backend_for),
    "c10d.add_backend": _over(2, _add_backend),
    "c10d.ALL_GATHER_FLAT": lambda name: callable(getattr(dist.ProcessGroupGloo, name)),
    "c10d.REDUCE_SCATTER_FLAT": lambda name: callable(getattr(dist.ProcessGroupGloo, name)),
    "c10d.check_reducer_finalized": _over(2, _check_reducer_finalized),
    "fsdp.StridedShard": _cuts_in_strides,
    "fsdp.pre_forward": _over(2, _runs_a_unit_without_calling_it),
    "fsdp.post_forward": _over(2, _runs_a_unit_without_calling_it),
    "fsdp.is_gathered": _over(2, _is_gathered_until_reset),
    "fsdp.reset_after_error": _over(2, _is_gathered_until_reset),
    "fsdp._reset": _over(2, _is_gathered_until_reset),  # where torch has none of its own
    "pipelining.stage_backward_input": _halves,
}
