"""Error feedback: no gradient is lost, and SGD reaches the optimum."""

import pytest
import torch
from compression_cases import arrived, normal, repeatable, zeros_to_keep
from hypothesis import given
from hypothesis import strategies as st

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
