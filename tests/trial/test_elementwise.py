"""Optimizers that look at whole tensors are found by what they do, under whatever name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.adamw8bit import AdamW8bit
from shoal.trial import optimizer_is_elementwise, optimizer_steps_parameters_alone


class UserOptimizer(Optimizer):
    """An optimizer of a script: what it does with a gradient is `update`."""

    def __init__(self, params: Any, lr: float, scale: float) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                step = self.update(parameter, parameter.grad * group["scale"])
                parameter.sub_(step, alpha=group["lr"])


class Plain(UserOptimizer):
    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        average = self.state[parameter].setdefault("average", torch.zeros_like(gradient))
        return average.lerp_(gradient, 0.1).sign()


class TrustRatio(UserOptimizer):
    """As LAMB and LARS do."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (parameter.norm() / (gradient.norm() + 1e-8))


class Orthogonal(UserOptimizer):
    """As Muon does: matrices only."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        assert gradient.ndim == 2
        x = gradient / gradient.norm()
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x


class RowMeans(UserOptimizer):
    """Exact on rows, wrong on columns."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(-1, keepdim=True) if gradient.ndim > 1 else gradient


class GlobalClip(UserOptimizer):
    """Flattens all gradients."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            flat = torch.cat([p.grad.flatten() for p in group["params"]])
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / flat.norm() * group["lr"])


class Noisy(UserOptimizer):
    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


def params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [*nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).parameters()]


ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-8)),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "SparseAdam": torch.optim.SparseAdam,
    "AdamW8bit": AdamW8bit,
    "a rate of 0": lambda p: torch.optim.SGD(p, 0.0),
    "two groups": lambda p: torch.optim.SGD(
        [{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.1}], 0.01
    ),
    "of a script": lambda p: Plain(p, 0.1, 2.0),
    "means of rows": lambda p: RowMeans(p, 0.1, 2.0),
}

WHOLE: dict[str, Callable[[Any], Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2]),
    "trust ratio": lambda p: TrustRatio(p, 0.1, 2.0),
    "orthogonal": lambda p: Orthogonal([x for x in p if x.ndim == 2], 0.1, 2.0),
    "global norm": lambda p: GlobalClip(p, 0.1, 2.0),
    "noise": lambda p: Noisy(p, 0.1, 2.0),
}


OLD_ADAGRAD = (2, 13)
"""Adagrad's state was made by its constructor before, and a copy has none: it cannot be tried."""


def can_be_tried(name: str) -> bool:
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    return name != "Adagrad" or version >= OLD_ADAGRAD


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_that_steps_each_number_by_itself_may_step_shards(name: str) -> None:
    answer = optimizer_is_elementwise(ELEMENTWISE[name](params()))
    assert answer.is_elementwise is (True if can_be_tried(name) else None), answer


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_looks_at_whole_tensors_is_found(name: str) -> None:
    answer = optimizer_is_elementwise(WHOLE[name](params()))
    assert answer.is_elementwise is False, answer
    cause = "draws random numbers" if name == "noise" else "looks at whole tensors"
    assert cause in answer.reason


TOGETHER = {"LBFGS", "global norm", "noise"}
"""Those whose step of a parameter depends on the other parameters, or on their number."""


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_an_optimizer_that_looks_at_all_parameters_together_is_found(name: str) -> None:
    answer = optimizer_steps_parameters_alone((ELEMENTWISE | WHOLE)[name](params()))
    assert answer.is_elementwise is (name not in TOGETHER if can_be_tried(name) else None), answer


def test_a_cut_along_columns_tells_what_one_along_rows_cannot() -> None:
    assert not optimizer_is_elementwise(RowMeans(params(), 0.1, 2.0), dim=1).is_elementwise


def test_every_optimizer_of_torch_has_been_tried() -> None:
    names = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    assert names - {"Optimizer"} <= {*ELEMENTWISE, *WHOLE}


def test_the_optimizer_its_state_and_the_generators_stay_as_they_are() -> None:
    parameters, calls = params(), []
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = str(optimizer.state_dict()), torch.get_rng_state().tolist(), len(calls)
    values = [parameter.tolist() for parameter in parameters]
    assert optimizer_is_elementwise(optimizer).is_elementwise
    assert (str(optimizer.state_dict()), torch.get_rng_state().tolist(), len(calls)) == before
    assert [parameter.tolist() for parameter in parameters] == values


def test_an_optimizer_whose_copy_cannot_step_is_left_to_others() -> None:
    class Bound(UserOptimizer):
        def step(self) -> None:
            raise RuntimeError("steps only where it was made")

    answer = optimizer_is_elementwise(Bound(params(), 0.1, 2.0))
    assert answer.is_elementwise is None
    assert "steps only where it was made" in answer.reason
