"""Steps of a GPT in slices on two ranks: `parallelize_module` by hand, and tensor=2."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.models import build
from shoal.run.supervised import supervised

TIME, VOCABULARY, WIDTH, BATCH, STEPS = 64, 256, 256, 8, 6
COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up")
ROWS = ("attention.output", "mlp.down")


def gpt() -> nn.Module:
    torch.manual_seed(0)
    options = {"width": WIDTH, "layers": 6, "heads": 8, "tied": False}
    return build("gpt", VOCABULARY, (TIME,), options)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (STEPS * BATCH, TIME), generator=generator)
    return DataLoader(TensorDataset(tokens, tokens), BATCH, drop_last=True)


def by_hand(mesh: DeviceMesh) -> Callable[[], None]:
    """PyTorch's tutorial without sequence parallelism; one epoch when it is called.

    Query, key and value share their input, so that its gradient is summed once and not three times;
    the head and the loss are in slices too.
    """
    model, whole = gpt(), (Replicate(),)
    plan = {
        "attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        **dict.fromkeys(COLUMNS, ColwiseParallel()),
        **dict.fromkeys(ROWS, RowwiseParallel()),
    }
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embedding = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"token_embedding": embedding, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = data()

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            with loss_parallel():
                loss_of(model(x), y).backward()
            optimizer.step()

    return epoch


def by_shoal() -> Callable[[], None]:
    run, model = shoal.init("tensor=2", announce=lambda _: None), gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, data())

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(supervised(loss_of, model), x, y)
            optimizer.step()

    return epoch
