"""Error feedback: no gradient is lost, and SGD reaches the optimum."""

import math

import pytest
import torch
from compression_cases import arrived, normal, repeatable, zeros_to_keep
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.compression import parse
from shoal.comm.compression.base import Compression
from shoal.comm.compression.onebit import OneBit
from shoal.comm.compression.topk import TopK

KEEPING: list[Compression] = [TopK(0.01), TopK(0.1), TopK(1.0), OneBit()]

every_keeping_scheme = pytest.mark.parametrize("scheme", KEEPING, ids=str)


@every_keeping_scheme
@repeatable
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(st.floats(-1e3, 1e3), min_size=n, max_size=n))
    )
)
def test_no_sequence_of_gradients_loses_anything(
    scheme: Compression, steps: list[list[float]]
) -> None:
    gradients = torch.tensor(steps, dtype=torch.float64)
    memory = torch.zeros(gradients.shape[-1], dtype=torch.float64)
    sent = torch.zeros_like(memory)
    for gradient in gradients:
        sent += arrived(scheme, gradient, memory)
    total = gradients.sum(0) if steps else torch.zeros_like(memory)
    torch.testing.assert_close(sent + memory, total, rtol=0, atol=1e-12 * 1e3 * (len(steps) + 1))


@every_keeping_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wider_memory_keeps_what_the_gradients_dtype_would_round_away(
    scheme: Compression, dtype: torch.dtype
) -> None:
    memory = torch.zeros(100, dtype=torch.float64)
    total, sent = torch.zeros_like(memory), torch.zeros_like(memory)
    for step in range(50):
        gradient = normal(100, dtype, step)
        total += gradient
        sent += arrived(scheme, gradient, memory)
    torch.testing.assert_close(sent + memory, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", [TopK(0.1), OneBit()], ids=str)
def test_a_refused_step_costs_only_its_own_gradient(scheme: Compression) -> None:
    gradients = [normal(100, seed=step) for step in range(20)]
    gradients[7][3] = math.nan
    memory = torch.zeros(100, dtype=torch.float64)
    sent = torch.zeros_like(memory)
    for gradient in gradients:
        decoded = arrived(scheme, gradient, memory)
        if decoded.isfinite().all():
            sent += decoded
    total = sum(
        (gradient for step, gradient in enumerate(gradients) if step != 7), torch.zeros_like(memory)
    )
    torch.testing.assert_close(sent + memory, total, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_always_small_is_sent_in_the_end() -> None:
    gradient = torch.tensor([1.0, 0.9, 0.05])
    memory = torch.zeros(3)
    with_memory = sum(arrived(TopK(0.3), gradient, memory)[2] for _ in range(200))
    without = sum(arrived(TopK(0.3), gradient)[2] for _ in range(200))
    assert with_memory == pytest.approx(10.0, abs=2.0)
    assert without == 0.0


@pytest.mark.parametrize("text", ["bf16", "fp16", "topk=0.1", "onebit"])
def test_sgd_on_a_quadratic_converges_to_its_optimum(text: str) -> None:
    scheme = parse(text)
    assert scheme is not None
    curvature, optimum = torch.linspace(0.5, 1, 50, dtype=torch.float64), normal(50)
    weights = torch.zeros(50, dtype=torch.float64)
    memory = zeros_to_keep(scheme, weights)
    for _ in range(800):
        weights -= 0.05 * arrived(scheme, curvature * (weights - optimum), memory)
    torch.testing.assert_close(weights, optimum, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [TopK(0.1), OneBit()], ids=str)
def test_workers_that_disagree_meet_at_the_optimum_of_their_mean(scheme: Compression) -> None:
    def distance(steps: int, memories: list[Tensor] | list[None]) -> float:
        weights = torch.zeros(50, dtype=torch.float64)
        for step in range(steps):
            pairs = zip(optima, memories, strict=True)
            sent = [arrived(scheme, weights - optimum, memory) for optimum, memory in pairs]
            weights -= torch.stack(sent).mean(0) * 2 / (20 + step)
        return float((weights - torch.stack(optima).mean(0)).abs().max())

    # A worker's own gradient never vanishes: with memory the distance falls as the rate does,
    # without it stays.
    optima = [worker + normal(50, seed=worker).exp() for worker in range(3)]
    assert distance(300, [torch.zeros(50, dtype=torch.float64) for _ in optima]) < 0.1
    assert distance(300, [None for _ in optima]) > 1


@pytest.mark.parametrize("scheme", [TopK(0.1), OneBit()], ids=str)
def test_a_memory_that_cannot_hold_the_error_is_our_own_bug(scheme: Compression) -> None:
    out = torch.empty(scheme.size_bytes(10, torch.float32), dtype=torch.uint8)
    for memory in (None, torch.zeros(9), torch.zeros(10, dtype=torch.bfloat16)):
        with pytest.raises(AssertionError):
            scheme.encode(torch.ones(10), memory, out)
