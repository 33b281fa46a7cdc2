"""A difference that float64 does not have is rounding, and no objection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.trial.judge_loss import try_loss
from shoal.trial.loss_verdict import LossKind, LossVerdict


class OtherAlgorithmForOne(nn.Module):
    """Computes a batch of one sample a little otherwise, as some kernels do."""

    def __init__(self, dtype_of_error: torch.dtype | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.dtype_of_error = dtype_of_error

    def forward(self, x: Tensor) -> Tensor:
        is_wrong = len(x) == 1 and self.dtype_of_error in (None, x.dtype)
        output: Tensor = self.layer(x) * self.scale * (1.01 if is_wrong else 1.0)
        return output


def judged(model: nn.Module) -> LossVerdict:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    return try_loss(lambda x, y: F.cross_entropy(model(x), y), (x, y), {}, 6, [model])


def test_a_difference_of_float32_alone_is_no_objection() -> None:
    model = OtherAlgorithmForOne(torch.float32)
    before = [(tensor, tensor.clone(), tensor._version) for tensor in model.state_dict().values()]
    assert judged(model).kind is LossKind.MEAN
    assert torch.get_default_dtype() == torch.float32
    for tensor, value, version in before:
        assert (tensor.dtype, tensor._version) == (torch.float32, version)
        assert torch.equal(tensor, value)


def test_a_difference_in_float64_too_is_an_objection() -> None:
    verdict = judged(OtherAlgorithmForOne(None))
    assert verdict.kind is LossKind.COUPLED
    assert verdict.difference < 0.05


def test_where_float64_fails_float32_decides() -> None:
    def takes_float32_alone(_: nn.Module, args: tuple[Tensor]) -> None:
        if args[0].dtype != torch.float32:
            raise TypeError

    model = OtherAlgorithmForOne(torch.float32)
    model.layer.register_forward_pre_hook(takes_float32_alone)
    assert judged(model).kind is LossKind.COUPLED


def test_weights_that_the_loss_itself_holds_are_in_float64_too() -> None:
    model = OtherAlgorithmForOne(torch.float32)
    weight, (x, y) = model.layer.weight, (torch.randn(6, 4), torch.randint(0, 3, (6,)))
    verdict = try_loss(
        lambda x, y: F.cross_entropy(model(x) + x @ weight.T, y) + weight.square().sum(),
        *((x, y), {}, 6, [model]),
    )
    assert verdict.kind is LossKind.MEAN
