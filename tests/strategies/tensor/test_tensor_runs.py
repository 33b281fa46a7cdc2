"""Tensor parallel runs: memory, messages, evaluation, saving, copies, precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_parallel_models import gpt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import shoal
from shoal.errors import LaunchError, StrategyRefused, UsageError
from shoal.run.supervised import supervised
from shoal.strategies.loss_terms import Counted
from shoal.strategies.tensor.vocabulary import VocabParallelLogits
from shoal.testing import world
from tests.matrix.cases import images, tokens


def prepared(
    strategy: str, model: nn.Module, precision: str = "fp64"
) -> tuple[shoal.Run, nn.Module, torch.optim.Optimizer, DataLoader, list[str]]:
    said: list[str] = []
    run = shoal.init(strategy, precision=precision, announce=said.append)  # type: ignore[arg-type]
    model = model.double() if precision == "fp64" else model
    data = tokens() if hasattr(model, "token_embedding") else images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return run, *run.prepare(model, optimizer, DataLoader(data, batch_size=10)), said


def per_token(logits: Tensor, target: Tensor) -> Counted:
    rows = logits.flatten(0, 1)
    total = F.cross_entropy(
        rows, target.flatten(), ignore_index=-100, label_smoothing=0.1, reduction="sum"
    )
    return shoal.counted(total, (target != -100).sum())


def hits(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.detach().argmax(dim=-1) == target).sum().view(1).double()


def train_and_save(
    strategy: str, file: Path
) -> tuple[float, float, dict[str, float], Tensor, list[str]]:
    torch.manual_seed(0)
    run, model, optimizer, loader, said = prepared(strategy, gpt())

    def compute_loss(x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return per_token(logits, y), shoal.summed(hits(logits, y))

    for x, y in loader:
        loss, _ = run.forward_backward(compute_loss, x, y)
        norm = run.clip_gradients(0.3)
        optimizer.step()
        optimizer.zero_grad()
    sums = run.evaluate(lambda x, y: {"hits": (model(x).argmax(-1) == y).sum()}, loader_of_tokens())
    run.save(file)
    with torch.no_grad():
        softmax = model(tokens().tensors[0][:2]).softmax(-1)  # asks for all logits
    assert run.totals is not None
    sums["measured"] = float(run.totals[3])
    return loss.item(), norm.item(), sums, softmax, said


def loader_of_tokens() -> DataLoader:
    return DataLoader(tokens(), batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("tensor=2", 2), ("tensor=2,zero3", 4), ("tensor=2,sequence=true", 2)]
)
def test_a_run_in_slices_says_counts_and_saves_what_one_device_does(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    loss, norm, sums, softmax, _ = train_and_save("single", tmp_path / "one.pt")
    found = world.run(ranks, train_and_save, strategy, tmp_path / "cut.pt")
    for other_loss, other_norm, other_sums, other_softmax, _ in found:
        assert (other_loss, other_norm) == pytest.approx((loss, norm), rel=1e-10)
        assert other_sums == sums
        assert torch.allclose(other_softmax, softmax, rtol=1e-10, atol=0)
    said = found[0][4]
    assert said[0].endswith(f"; {ranks} ranks = {ranks // 2} data x 2 tensor")
    assert "tensor=2: vocabulary: token_embedding, head" in said
    one, cut = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "cut.pt"))
    assert list(one) == list(cut)
    assert all(torch.allclose(cut[name], one[name], rtol=1e-9, atol=1e-12) for name in one)


def count_held_and_sent(strategy: str) -> tuple[int, int, set[str]]:
    run, model, _, loader, _ = prepared(strategy, gpt())
    x, y = next(iter(loader))
    logits = []

    def loss_of(out: Tensor, target: Tensor) -> Counted:
        logits.append(type(out))
        return per_token(out, target)

    compute_loss = supervised(loss_of, model)
    for _ in range(2):  # steps 1 and 2 try the loss on whole outputs, too
        run.forward_backward(compute_loss, x, y)
    logits.clear()
    sent: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: object, **options: object) -> object:
        sent.append(tensor.numel())
        return original(tensor, *args, **options)

    dist.all_reduce = counting
    run.forward_backward(compute_loss, x, y)
    own = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )
    return own, max(sent), {kind.__name__ for kind in logits}


@pytest.mark.slow
def test_a_rank_holds_half_and_sends_no_logits() -> None:
    model = gpt()
    whole = sum(p.numel() for p in model.parameters())
    left = sum(
        p.numel() for n, p in model.named_parameters() if "norm" in n or n.startswith("position")
    )
    left += sum(
        p.numel() for n, p in model.named_parameters() if n.endswith(("output.bias", "down.bias"))
    )
    stream = 10 * 13 * 8
    for own, largest, kinds in world.run(2, count_held_and_sent, "tensor=2"):
        assert own == left + (whole - left) // 2
        assert largest == stream
        assert kinds == {"VocabParallelLogits"}


def call_from_outside() -> list[str]:
    _, model, _, loader, _ = prepared("tensor=2", gpt())
    x = next(iter(loader))[0]
    hidden = model.token_embedding(x)
    block, said = model.blocks[0], []
    for layer in (block.attention.query, block.attention.output, block.mlp.up):
        with pytest.raises(UsageError) as refusal:
            layer(hidden)
        said.append(str(refusal.value))
    return said


def test_a_slice_is_never_taken_for_the_whole() -> None:
    for said in world.run(2, call_from_outside):
        assert all("was called from outside" in each for each in said)


class Drifting(nn.Sequential):
    """Computes other values on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = super().forward(x) * (1.0 + 0.1 * dist.get_rank())
        return scores


def run_drifting() -> None:
    run, model, _, loader, _ = prepared(
        "tensor=2", Drifting(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 10), nn.LayerNorm(10))
    )
    x, y = next(iter(loader))
    run.forward_backward(supervised(F.cross_entropy, model), x, y)


def test_ranks_that_compute_something_else_are_found_in_the_first_step() -> None:
    with pytest.raises(
        LaunchError,
        match="whole on every rank of the tensor group, but with other gradients on some",
    ):
        world.run(2, run_drifting)


def losses_in_precision(strategy: str, precision: str) -> list[float]:
    torch.manual_seed(0)
    run, model, optimizer, loader, _ = prepared(strategy, gpt(), precision)
    losses = []
    for x, y in loader:
        losses.append(run.forward_backward(supervised(per_token, model), x, y).item())
        run.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [
        pytest.param("tensor=2", 2, "bf16", marks=pytest.mark.slow),
        ("tensor=2", 2, "fp16"),
        pytest.param("tensor=2,sequence=true", 2, "bf16", marks=pytest.mark.slow),
        pytest.param("tensor=2,sequence=true", 2, "fp16", marks=pytest.mark.slow),
        pytest.param("tensor=2,pipeline=2", 4, "bf16", marks=pytest.mark.slow),
        pytest.param("tensor=2,pipeline=2,schedule=zbv", 4, "fp16", marks=pytest.mark.slow),
    ],
)
def test_half_precision_goes_with_slices(strategy: str, ranks: int, precision: str) -> None:
    expected = losses_in_precision("single", precision)
    for found in world.run(ranks, losses_in_precision, strategy, precision):
        assert found == pytest.approx(expected, rel=2e-2)
        assert len(found) == 4


def refused_in_8_bits() -> str:
    from shoal.optim.adamw8bit import AdamW8bit

    run, model = shoal.init("tensor=2", announce=lambda _: None), gpt()
    with pytest.raises(StrategyRefused) as refusal:
        run.prepare(model, AdamW8bit(model.parameters()), DataLoader(tokens(), batch_size=10))
    return str(refusal.value)


def test_blocks_of_whole_rows_are_refused_where_rows_are_in_slices() -> None:
    assert "Use AdamW, or leave out tensor" in world.run(2, refused_in_8_bits)[0]


def test_servers_are_refused_beside_slices() -> None:
    with pytest.raises(LaunchError, match="under tensor and pipeline no rank has them"):
        world.run(2, train_and_save, "tensor=2,server=1", Path("unused"))


def rows() -> list[Tensor]:
    """Return errors of cross-entropy of divided logits, after several views of them."""
    run = shoal.init("tensor=2", announce=lambda _: None)
    torch.manual_seed(1)
    whole = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 8, (3, 5))
    target[0, :2] = -100
    axis = run.mesh.tensor
    half = slice(4 * axis.rank, 4 * axis.rank + 4)
    sliced = VocabParallelLogits.of(whole[..., half], axis)
    found = []
    for shift in (lambda x: x, lambda x: x[:, :-1], lambda x: x[..., 1:, :].contiguous()):
        for options in (
            {},
            {"label_smoothing": 0.2},
            {"reduction": "sum"},
            {"weight": torch.arange(8.0).double()},
        ):
            logits, expected = shift(sliced), shift(whole)
            rows = target[:, : logits.shape[1]].reshape(-1)
            one = F.cross_entropy(logits.view(-1, 8), rows, **options)
            other = F.cross_entropy(expected.reshape(-1, 8), rows, **options)
            (own,) = torch.autograd.grad(one, whole, retain_graph=True)
            (all_of_it,) = torch.autograd.grad(other, whole)
            found += [one - other, (own - all_of_it)[..., half].abs().max()]
    ties = torch.zeros(2, 8, dtype=torch.float64)
    assert torch.equal(VocabParallelLogits.of(ties[:, half], axis).argmax(-1), ties.argmax(-1))
    assert torch.equal(sliced.argmax(-1), whole.argmax(-1))
    assert sliced.shape == whole.shape
    assert torch.equal(sliced + 1, whole + 1)
    assert torch.equal(torch.stack([sliced, sliced]), torch.stack([whole, whole]))
    return [value.detach() for value in found]


def test_the_loss_of_sliced_logits_is_that_of_the_whole() -> None:
    for found in world.run(2, rows):
        assert max(value.abs().item() for value in found) < 1e-14
