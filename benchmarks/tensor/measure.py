"""Step time of tensor=2 against `parallelize_module` by hand, in the same processes, in turns; the
bytes of a block.

`make bench-tensor`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from benchmarks.interleaved import in_turns
from benchmarks.report_page import circumstances, write_result
from shoal.models import build
from shoal.run.supervised import supervised

RESULT = Path(__file__).with_name("result.json")
TIME, VOCABULARY, WIDTH, BATCH, STEPS = 64, 256, 256, 8, 6


def gpt(layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return build(
        "gpt", VOCABULARY, (TIME,), {"width": WIDTH, "layers": layers, "heads": 8, "tied": False}
    )


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def data() -> DataLoader:
    tokens = torch.randint(
        0, VOCABULARY, (STEPS * BATCH, TIME), generator=torch.Generator().manual_seed(0)
    )
    return DataLoader(TensorDataset(tokens, tokens), BATCH, drop_last=True)


def by_hand(prepared: bool, vocabulary: bool, mesh: DeviceMesh | None = None) -> Callable[[], None]:
    """PyTorch's tutorial without sequence parallelism; one epoch when it is called.

    Args: prepared: query, key and value share their input, so that its gradient is summed once and
        not three times. vocabulary: the head and the loss in slices as well, as in the tutorial's
        last part. mesh: None for the world's.
    """
    model, mesh = gpt(), mesh or init_device_mesh("cpu", (2,))
    columns = dict.fromkeys(
        ("attention.query", "attention.key", "attention.value", "mlp.up"), ColwiseParallel()
    )
    rows = dict.fromkeys(("attention.output", "mlp.down"), RowwiseParallel())
    whole = (Replicate(),)
    shared = (
        {"attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)}
        if prepared
        else {}
    )
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, {**shared, **columns, **rows})
    if vocabulary:
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(
            model,
            mesh,
            {"token_embedding": RowwiseParallel(input_layouts=Replicate()), "head": head},
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = data()

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            with loss_parallel() if vocabulary else nullcontext():
                loss_of(model(x), y).backward()
            optimizer.step()

    return epoch


def by_shoal(options: str, layers: int = 6) -> Callable[[], None]:
    run, model = shoal.init(f"tensor=2{options}", announce=lambda _: None), gpt(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, data())

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(supervised(loss_of, model), x, y)
            optimizer.step()

    return epoch


def sent_bytes(layers: int) -> float:
    """Bytes of all tensors that are summed over ranks in a step."""
    epoch, original, sizes = by_shoal("", layers), dist.all_reduce, []
    epoch()  # the first step compares

    def counting(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.nbytes)
        return original(tensor, *args, **options)

    dist.all_reduce = counting
    epoch()
    dist.all_reduce = original
    return sum(sizes) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    facts = circumstances(("torch", "shoal"))
    block_bytes = (sent_bytes(4) - sent_bytes(2)) / 2
    candidates = {
        "tutorial, blocks": by_hand(prepared=False, vocabulary=False),
        "by hand, blocks": by_hand(prepared=True, vocabulary=False),
        "Shoal, blocks": by_shoal(",whole=token_embedding+head"),
        "by hand, blocks and vocabulary": by_hand(prepared=True, vocabulary=True),
        "Shoal, blocks and vocabulary": by_shoal(""),
    }
    times_s = in_turns(candidates, STEPS, options.rounds)
    if dist.get_rank() == 0:
        formula_bytes = 4 * BATCH * TIME * WIDTH * 4
        found = {
            "circumstances": facts,
            "step_s": times_s,
            "block_bytes": block_bytes,
            "formula_bytes": formula_bytes,
        }
        write_result(RESULT, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
