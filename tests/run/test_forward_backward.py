"""`forward_backward`: the gradients of one device whatever the loss and the batch, and errors
where it is misused.
"""

import pytest
import torch
import torch.nn.functional as F
from minimal_script import data, parts, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.run.supervised import supervised
from shoal.strategies.loss_terms import Counted
from shoal.testing import world
from tests.harness.in_turn import in_turn


def test_a_missing_prepare_is_an_error_with_the_cure() -> None:
    run = quiet()
    model, _, loader = parts()
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match=r"no model was prepared.*run\.prepare"):
        run.forward_backward(supervised(F.cross_entropy, model), x, y)


def test_a_model_that_is_not_the_prepared_one_is_an_error() -> None:
    run = quiet()
    _, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match="no parameter of the prepared models has a gradient"):
        run.forward_backward(supervised(F.cross_entropy, nn.Linear(4, 3).double()), x, y)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    with pytest.raises(UsageError, match=r"shape \(4,\).*mean over its batch"):
        run.forward_backward(
            supervised(
                lambda output, target: F.cross_entropy(output, target, reduction="none"), model
            ),
            x,
            y,
        )


def weighed_mean(output: Tensor, target: Tensor) -> Counted:
    """Weights that sum to far less than one."""
    weights = (1.0 + target.double()) / 100
    losses = F.cross_entropy(output.double(), target, reduction="none")
    return shoal.counted((losses * weights).sum(), weights.sum())


def two_calls(loss_fn: str, precision: str, with_loader: bool) -> list[Tensor]:
    run = shoal.init(precision=precision, announce=lambda _: None)  # type: ignore[arg-type]
    model, optimizer, loader = parts(batch_size=10)
    prepared = run.prepare(model, optimizer, loader if with_loader else None)
    x, y = (
        next(iter(prepared[2]))
        if with_loader
        else [t[run.rank :: run.world_size] for t in data().tensors]
    )
    function = weighed_mean if loss_fn == "weighed" else F.cross_entropy
    gradients = []
    for _ in range(2):
        run.forward_backward(supervised(function, model), x, y)
        gradients.append(model.weight.grad.clone())
    return gradients


def gradient_alone(loss_fn: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = data().tensors
    if loss_fn == "weighed":
        (term,) = weighed_mean(model(x), y).terms
        (term.value / term.count).backward()
    else:
        F.cross_entropy(model(x), y).backward()
    return model.weight.grad


def test_a_second_call_before_the_step_adds_its_gradients() -> None:
    calls = ("mean", "fp32", True), ("mean", "fp16", False), ("weighed", "fp32", False)
    for results in world.run(2, in_turn, two_calls, *calls):
        for (once, twice), (loss_fn, precision, _) in zip(results, calls, strict=True):
            tolerance = 1e-10 if precision == "fp32" else 1e-2
            close = {"rtol": tolerance, "atol": tolerance / 10}
            assert torch.allclose(once, gradient_alone(loss_fn), **close)
            assert torch.allclose(twice, 2 * once, **close)


def test_a_batch_of_ignored_samples_gives_zeros_and_no_nan() -> None:
    run = quiet()
    model, _, loader = run.prepare(*parts())
    x, y = next(iter(loader))
    loss = run.forward_backward(
        supervised(lambda out, y: shoal.counted(out.sum() * 0, torch.zeros(())), model), x, y
    )
    assert loss == 0
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))


def mean_of_tokens_times_their_count(strategy: str, form: str) -> list[Tensor]:
    run = shoal.init(strategy, announce=lambda _: None)
    model, optimizer, _ = parts()
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(half_ignored(), batch_size=10)
    )

    def compute_loss(x: Tensor, y: Tensor) -> Counted:
        tokens = (y != -100).sum()  # 0 on the second rank, whose mean is NaN
        return shoal.counted(F.cross_entropy(model(x), y) * tokens, tokens)

    (x, y) = next(iter(loader))
    loss = (
        run.backward(compute_loss(x, y))
        if form == "loop"
        else run.forward_backward(compute_loss, x, y)
    )
    assert run.finite
    optimizer.step()
    return [loss, *run.weights().values()]


def half_ignored() -> TensorDataset:
    x, y = (t[:10] for t in data().tensors)
    return TensorDataset(x, torch.where(torch.arange(10) < 5, y, -100))


def test_a_rank_whose_samples_are_all_ignored_adds_nothing() -> None:
    expected = {f: mean_of_tokens_times_their_count("single", f) for f in ("loop", "function")}
    calls = [(strategy, form) for strategy in ("ddp", "zero3") for form in expected]
    for results in world.run(2, in_turn, mean_of_tokens_times_their_count, *calls):
        for found, (_, form) in zip(results, calls, strict=True):
            for value, other in zip(expected[form], found, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-10)
