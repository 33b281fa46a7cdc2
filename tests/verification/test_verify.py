"""`shoal verify` in the library and on the command line: it passes right strategies only."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.cli import main
from shoal.errors import ConfigError, LaunchError, UsageError
from shoal.testing import world
from shoal.verification import verify_job
from tests.matrix.cases import EXPERIMENTS


@pytest.mark.parametrize(
    ("name", "worst"),
    [
        ("NotDivided", "gradient of"),
        ("OneNotReduced", "head.bias"),
        ("StaleBinding", "after 5 steps|in step|loss of step"),
        ("ShareDropped", "gradient of|loss of step"),
    ],
)
def test_a_broken_strategy_is_caught(name: str, worst: str) -> None:
    verdict = verify_job(EXPERIMENTS["mlp"], f"broken_strategies:{name}", 2)
    assert verdict.verdict == "differs"
    assert verdict.max_relative_error is not None
    assert verdict.max_relative_error > 1e-3
    assert any(part in str(verdict.worst_parameter) for part in worst.split("|")), verdict


def test_the_same_strategy_unbroken_is_exact() -> None:
    assert verify_job(EXPERIMENTS["mlp"], "broken_strategies:Right", 2).verdict == "exact"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = 3 if step == 4 else 8
    return torch.randn(rows, 6, generator=generator), torch.randint(
        0, 3, (rows,), generator=generator
    )


def uneven_batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2 + step, 6), torch.zeros(2 + step, dtype=torch.int64)


def lopsided_batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 6), torch.zeros(3, dtype=torch.int64)


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no loss today")


def a_loss_for_each_sample(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class WithNothing(nn.Module):
    """A model with an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.nothing = nn.Linear(6, 3), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.nothing.sum()
        return output


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def test_a_users_own_functions_are_verified_in_float64_whatever_they_give() -> None:
    verdict = shoal.verify(model, batch, F.cross_entropy, strategy="zero3", ranks=3)
    assert verdict.verdict == "exact"
    assert verdict.max_relative_error is not None
    assert 0 <= verdict.max_relative_error <= 1e-12
    assert (
        str(verdict)
        .splitlines()[-1]
        .startswith("zero3, 3 ranks, 5 steps: exact: largest relative error ")
    )


def test_a_parameter_without_entries_is_no_obstacle() -> None:
    assert shoal.verify(WithNothing, batch, F.cross_entropy, steps=2).verdict == "exact"


def test_what_differs_by_design_is_told_with_its_reason_and_its_size() -> None:
    verdict = shoal.verify(norm, batch, F.cross_entropy, ranks=2, steps=3)
    assert verdict.verdict == "differs by design"
    assert "BatchNorm (1" in verdict.reasons[0]
    assert verdict.max_relative_error is not None
    assert verdict.max_relative_error > 1e-4


def test_a_refusal_is_a_verdict() -> None:
    verdict = shoal.verify(model, batch, F.cross_entropy, strategy="zero3,unit=Block", ranks=2)
    assert verdict.verdict == "refused"
    assert "the model has no module of that class" in verdict.reasons[0]
    assert verdict.max_relative_error is None


def test_a_refusal_that_needs_no_process_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "run", pytest.fail)
    verdict = shoal.verify(model, batch, F.cross_entropy, strategy="zero3,hybrid=3", ranks=2)
    assert verdict.verdict == "refused"
    assert "Use a divisor of 2" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("functions", "error", "message"),
    [
        (
            (model, uneven_batch, F.cross_entropy),
            LaunchError,
            "batches of 2, 3, 4, 5, 6 samples; all must have the same",
        ),
        (
            (model, lopsided_batch, F.cross_entropy),
            LaunchError,
            "samples in dimension 0; it gave a tuple of tensors with 3, 4",
        ),
        ((model, batch, failing_loss), LaunchError, "no loss today"),
        (
            (model, batch, a_loss_for_each_sample),
            LaunchError,
            r"^loss_fn returned a tensor of shape \(8,\) and of torch.float64; it must",
        ),
        (
            (lambda: model(), batch, F.cross_entropy),
            UsageError,
            "must be a function at the top of a module",
        ),
    ],
)
def test_wrong_functions_are_named(
    functions: tuple[Any, Any, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shoal.verify(*functions)


def test_wrong_numbers_and_names_are_refused_before_any_process_starts() -> None:
    with pytest.raises(UsageError, match="ranks=0, accumulate=1, steps=5: each must be at least 1"):
        shoal.verify(model, batch, F.cross_entropy, ranks=0)
    with pytest.raises(ConfigError, match="'zero4' is not known; did you mean 'zero"):
        shoal.verify(model, batch, F.cross_entropy, strategy="zero4")


def shoal_verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as end:
        main(["verify", *words])
    return end.value.code, capsys.readouterr().out


SMALL = (
    "digits",
    "--model.options.widths",
    "[4,4]",
    "--model.options.groups",
    "2",
    "--train.batch_size",
    "20",
)


def test_the_command_prints_the_worst_tensors_and_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out = shoal_verify(capsys, *SMALL, "-n", "3", "--strategy", "zero2", "--steps", "2")
    assert status == 0
    assert out.splitlines()[-1].startswith("zero2, 3 ranks, 2 steps: exact")
    assert len(out.splitlines()) == 6


def test_the_command_gives_json_and_fails_past_the_tolerance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out = shoal_verify(capsys, *SMALL, "--steps", "1", "--tolerance", "1e-30", "--json")
    found = json.loads(out)["result"]
    assert status == 1
    assert found["verdict"] == "differs"
    assert found["worst_parameter"] == found["worst"][0]["what"]
    assert 0 < found["max_relative_error"] < 1e-12


def test_the_command_tells_a_refusal_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = shoal_verify(capsys, *SMALL, "--strategy", "zero1,hybrid=4", "--steps", "1")
    assert status == 2
    assert "refused" in out


@pytest.mark.parametrize(
    "fails", [LaunchError("rank 1 of 2 was killed"), ZeroDivisionError("a mistake of ours")]
)
def test_what_ends_without_a_verdict_has_another_status_than_what_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails: Exception
) -> None:
    def no_world(*_: object, **__: object) -> None:
        raise fails

    monkeypatch.setattr(world, "run", no_world)
    with pytest.raises(SystemExit) as end:
        main(["verify", *SMALL])
    assert end.value.code == 2
    assert str(fails) in capsys.readouterr().err
