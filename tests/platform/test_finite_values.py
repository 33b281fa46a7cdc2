"""NaN and infinities are found in every kind of tensor, with compiled code and without it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.platform import finite_values
from shoal.platform.finite_values import EXCHANGE, first_copy, first_look, has_compiled_look
from shoal.strategies.finite_check import FiniteCheck, nonfinite_names, seem_finite

needs_compiler = pytest.mark.skipif(
    not has_compiled_look(), reason="there was no compiler when Shoal was installed"
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (1, 2, 255, 256, 257, 1000, 4096, 5003)
SPOILED = (math.nan, -math.nan, math.inf, -math.inf)


@pytest.fixture(params=[pytest.param(True, marks=needs_compiler), False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Look with the compiled code, or without."""
    monkeypatch.setattr(finite_values, "_is_usable", request.param)
    return bool(request.param)


def extremes(dtype: torch.dtype, length: int) -> Tensor:
    """Return the largest and the smallest finite numbers."""
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2, 1.0]
    return torch.tensor(numbers, dtype=dtype).repeat(length // len(numbers) + 1)[:length]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_that_is_not_finite_is_found_wherever_it_lies(
    compiled: bool, dtype: torch.dtype
) -> None:
    chance = random.Random(0)
    for length in LENGTHS:
        places = {0, length - 1, *(chance.randrange(length) for _ in range(20))}
        for place in places:
            for spoiled in SPOILED:
                values = torch.ones(length, dtype=dtype)
                values[place] = spoiled
                assert not seem_finite([torch.ones(7), values]), (length, place, spoiled)
                assert nonfinite_names({"a": torch.ones(7), "b": values}) == ["b"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_finite_are(compiled: bool, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        assert seem_finite([torch.randn(length, dtype=dtype), torch.zeros(0, dtype=dtype)])
    assert seem_finite([])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_takes_no_large_finite_value_for_infinity(dtype: torch.dtype) -> None:
    values = torch.full((5003,), torch.finfo(dtype).max, dtype=dtype)
    assert first_look([values, -values, extremes(dtype, 5003)]) == (True, [])
    assert nonfinite_names({"a": values}) == []


@needs_compiler
def test_every_bit_pattern_of_halves_is_judged_as_torch_judges_it() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = patterns.view(dtype)
        found = [first_look([value])[0] for value in values.split(1)[::7]]
        assert found == values.isfinite().tolist()[::7]


def dense_in_other_orders() -> dict[str, Tensor]:
    """Return finite tensors that are not contiguous, or not plain tensors."""
    return {
        "transposed": torch.ones(3, 5).t(),
        "with gaps": torch.ones(8, 8)[:, ::2],
        "channels last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(9),
        "parameter": nn.Parameter(torch.ones(4)),
        "complex": torch.ones(4, dtype=torch.complex64),
        "sparse": torch.diag(torch.ones(4)).to_sparse(),
    }


@pytest.mark.parametrize("name", dense_in_other_orders())
def test_tensors_of_other_kinds_are_looked_at(compiled: bool, name: str) -> None:
    tensor = dense_in_other_orders()[name]
    assert seem_finite([torch.ones(3), tensor])
    spoiled: Any = tensor.detach().clone() * math.nan
    assert not seem_finite([torch.ones(3), spoiled])


def test_values_between_those_of_a_tensor_do_not_count(compiled: bool) -> None:
    memory = torch.full((8, 8), math.nan)
    memory[:, ::2] = 1.0
    assert seem_finite([memory[:, ::2], memory[:, 0]])


@needs_compiler
def test_large_tensors_are_left_to_torch_where_it_has_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finite_values, "ONE_THREAD_BYTES", 400)
    small, large = torch.ones(100), torch.ones(101)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    finite, others = first_look([small, large])
    assert finite
    assert len(others) == 1
    assert others[0] is large
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert first_look([small, large]) == (True, [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_finds_each_value_that_is_not_finite_and_copies_every_bit(
    compiled: bool, dtype: torch.dtype
) -> None:
    chance = random.Random(0)
    for length in LENGTHS:
        for place in (0, length - 1, chance.randrange(length)):
            for spoiled in (*SPOILED, 1.0):
                values = torch.randn(length, dtype=dtype)
                values[place] = spoiled
                sources = [torch.ones(3, dtype=dtype), values, torch.ones(2, dtype=dtype)]
                targets = [torch.zeros_like(source) for source in sources]
                check = FiniteCheck()
                assert check.copy(targets, sources) == check.found == (spoiled != 1.0)
                for target, source in zip(targets, sources, strict=True):
                    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("name", dense_in_other_orders())
def test_tensors_of_other_kinds_are_copied_too(compiled: bool, name: str) -> None:
    tensor = dense_in_other_orders()[name].detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    tensor = tensor * torch.randn(()) if name == "expanded" else tensor
    target, plain = torch.zeros(tensor.shape, dtype=tensor.dtype), torch.zeros(4)
    check = FiniteCheck()
    assert not check.copy([plain, target], [torch.ones(4), tensor])
    assert torch.equal(target, tensor)
    assert torch.equal(plain, torch.ones(4))
    assert check.copy([plain, target], [torch.ones(4), tensor * math.nan])


@needs_compiler
def test_a_copy_leaves_to_torch_what_memory_alone_does_not_tell() -> None:
    negated = torch.ones(4, dtype=torch.complex64).conj().imag  # its memory has the other sign
    negative = torch._neg_view(torch.ones(4))
    pairs = [
        (torch.zeros(4), torch.ones(4, dtype=torch.float64)),
        (torch.zeros(4), negative),
        (torch.zeros(4), negated),
        (torch.zeros(2, 2).t(), torch.ones(2, 2)),
        (torch.zeros(4), torch.ones(4)),
    ]
    targets, sources = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert first_copy(targets, sources) == (True, [0, 1, 2, 3])
    FiniteCheck().copy(targets, sources)
    for target, source in pairs:
        assert torch.equal(target.double(), source.double())
    assert targets[1][0] == -1


@needs_compiler
def test_large_tensors_are_copied_by_torch_where_it_has_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finite_values, "ONE_THREAD_BYTES", 400)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sources = [torch.ones(100), torch.ones(101)]
    targets = [torch.zeros_like(source) for source in sources]
    assert first_copy(targets, sources) == (True, [1])
    assert targets[0].sum() == 100


@needs_compiler
def test_what_are_no_lists_of_tensors_is_an_error_of_a_copy() -> None:
    compiled_code: Any = finite_values.compiled
    with pytest.raises(TypeError, match="three lists"):
        compiled_code.copy_finite([], [])
    others: list[Any] = []
    assert compiled_code.copy_finite([3], [4], others, Tensor, EXCHANGE, 1)
    assert others == [0]


def test_the_environment_does_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_COMPILED", "0")
    assert not has_compiled_look()


@needs_compiler
def test_what_is_no_list_of_tensors_is_an_error() -> None:
    compiled_code: Any = finite_values.compiled
    with pytest.raises(TypeError, match="two lists"):
        compiled_code.are_finite([], [])
    others: list[Any] = []
    assert compiled_code.are_finite([3], others, Tensor, EXCHANGE, 1)
    assert others == [3]
