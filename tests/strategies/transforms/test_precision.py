import pytest
import torch

from shoal.errors import TrainingDiverged
from shoal.strategies.single import single_device
from shoal.strategies.transforms.precision import GROWTH_INTERVAL, LossScale, unscale


def test_the_scale_doubles_after_good_steps_and_halves_after_overflow() -> None:
    scale = LossScale(8.0)
    for _ in range(GROWTH_INTERVAL):
        scale.update(finite=True)
    assert scale.scale == 16.0
    scale.update(finite=False)
    assert (scale.scale, scale.skipped) == (8.0, 1)


def test_a_scale_that_no_gradient_fits_under_ends_the_run() -> None:
    scale = LossScale()
    for _ in range(36):
        scale.update(finite=False)
    with pytest.raises(
        TrainingDiverged, match=r"at a loss scale of 4\.8e-07, after 37 skipped steps.*use bf16"
    ):
        scale.update(finite=False)


def test_the_scale_comes_back_from_its_state() -> None:
    scale, other = LossScale(4.0), LossScale()
    scale.update(finite=True)
    other.load(scale.state())
    assert other.state() == scale.state()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_overflowed_are_marked_all_together(bad: float) -> None:
    part = single_device(torch.nn.Linear(2, 2))
    for parameter in part.trainable_params.values():
        parameter.grad = torch.full_like(parameter, 8.0)
    assert unscale(part, LossScale(4.0))
    assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in part.trainable_params.values())
    part.trainable_params["weight"].grad[0, 0] = bad
    assert not unscale(part, LossScale(4.0))
    assert all(parameter.grad.isnan().all() for parameter in part.trainable_params.values())
