"""DistributedDataParallel on the backend "shoal" with torch's own communication hooks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.testing import world

Register = Callable[[DistributedDataParallel], None]


def test_comm_hooks_come_to_what_they_come_to_on_gloo() -> None:
    assert world.run(2, _train_with_each_hook) == [len(HOOKS)] * 2


def _train_with_each_hook() -> int:
    for register in HOOKS:
        ours, gloos = (
            _train(register, group) for group in (dist.group.WORLD, dist.new_group(backend="gloo"))
        )
        torch.testing.assert_close(ours, gloos, rtol=1e-6, atol=1e-6)
    return len(HOOKS)


def _train(register: Register, group: dist.ProcessGroup | None) -> torch.Tensor:
    torch.manual_seed(3)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 8)),
        process_group=group,
        # Several buckets, but one for the hook whose callbacks call: they come in any order.
        bucket_cap_mb=25 if register is _power_sgd else 0.005,
    )
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _builtin_all_reduce(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def _python_float16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _power_sgd(model: DistributedDataParallel) -> None:
    group = model.process_group
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, use_error_feedback=False)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: tuple[Register, ...] = (_builtin_all_reduce, _python_float16, _power_sgd)
