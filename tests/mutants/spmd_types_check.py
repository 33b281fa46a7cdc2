"""`python -m tests.mutants.spmd_types_check`: what spmd_types says of bugs in tensor parallelism.

Needs `pip install spmd_types`. It checks types while a model computes its outputs, asks for its own
collectives, and for the types of parameters and inputs. So the loops of the catalog are rewritten
here: `CopyTo` is a conversion from invariant to replicated, `ReduceFrom` an all-reduce of varying
numbers, and a rank's slice of a whole matrix a conversion to a shard. One process checks them, in a
fake group of two ranks. A line of output for each: accepted, or the error that it raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from spmd_types import checker
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from tests.mutants import peers, tensor_parallel
from tests.mutants.mutant import mutants

RANKS = 2
CATALOG = "tests.mutants.catalog"


class Function:
    """A plain function in the place of an autograd function."""

    def __init__(self, apply: Callable[..., Tensor]) -> None:
        self.apply = apply


class TypedPeers(peers.Peers):
    """Peers whose calls spmd_types knows."""

    def __init__(self, group: Any) -> None:
        super().__init__(0, RANKS)
        self.group = group

    def mine(self, tensor: Tensor, dim: int) -> Tensor:
        return spmd.convert(tensor, self.group, src=spmd.I, dst=spmd.S(dim))

    def sum(self, tensor: Tensor) -> Tensor:
        return spmd.all_reduce(tensor, self.group, src=spmd.V, dst=spmd.I)


def main() -> None:
    """Print what becomes of each loop."""
    dist.init_process_group(backend="fake", rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    known = mutants()
    _rewrite(group)
    for name, mutant in known.items():
        is_tensor = issubclass(mutant.loop, tensor_parallel.TensorParallel)
        if is_tensor and not issubclass(mutant.loop, tensor_parallel.SequenceParallel):
            print(name, _judgement(mutant.loop, mesh, group), flush=True)


def _rewrite(group: Any) -> None:
    """Put functions of spmd_types in the place of those of the loops."""

    def copy(x: Tensor, _: Any) -> Tensor:
        return spmd.convert(x, group, src=spmd.I, dst=spmd.R)

    def reduce(x: Tensor, _: Any) -> Tensor:
        return spmd.all_reduce(x, group, src=spmd.V, dst=spmd.I)

    def of_expert(parameter: Tensor) -> Tensor:
        whole = spmd.convert(parameter, group, src=spmd.I, dst=spmd.R)
        return spmd.reinterpret(whole, group, src=spmd.R, dst=spmd.V, expert_mode=True)

    def experts(self: Any, x: Tensor) -> Tensor:
        weights = self.share(self.gate(x).softmax(-1))
        x = spmd.convert(x, group, src=spmd.I, dst=spmd.R)
        expert = self.experts[self.peers.rank]
        mine = nn.functional.linear(x, of_expert(expert.weight), of_expert(expert.bias))
        return spmd.all_reduce(weights[..., :1] * mine, group, src=spmd.V, dst=spmd.I)

    loops = [module for name, module in sys.modules.items() if name.startswith(CATALOG)]
    for module in (peers, tensor_parallel, *loops):
        _replace(module, "CopyTo", Function(copy))
        _replace(module, "ReduceFrom", Function(reduce))
    tensor_parallel.TensorParallel.embedding = type("Embedding", (nn.Embedding,), {"peers": None})
    tensor_parallel.Experts.forward = experts


def _replace(module: ModuleType, name: str, function: Function) -> None:
    if hasattr(module, name):
        setattr(module, name, function)


def _judgement(kind: Any, mesh: DeviceMesh, group: Any) -> str:
    try:
        loop = kind(TypedPeers(group))
        loop.model = loop.build()
        tokens = next(iter(DataLoader(loop.data(), batch_sampler=list(loop.orders()))))[0]
        with spmd.set_current_mesh(mesh), checker.typecheck(local=True):
            for parameter in loop.model.parameters():
                spmd.assert_type(parameter, {group: spmd.I})
            spmd.assert_type(tokens, {group: spmd.I})
            loop.model(tokens)
    except Exception as error:  # noqa: BLE001 - whatever it raises is its judgement
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return "accepted"


if __name__ == "__main__":
    main()
