import pytest
import torch
import torch.nn.functional as F

from shoal.errors import UsageError
from shoal.strategies.base import LocalBatch, Step
from shoal.strategies.transforms.accumulate import split_microbatches


def batch(rows: int, tensor_rows: int | None = None) -> LocalBatch:
    x = torch.arange(max(tensor_rows or rows, 1))
    return LocalBatch(
        Step(F.cross_entropy, global_batch_size=10),
        ({"x": x, "pair": (x, x)},),
        {"target": x},
        rows,
        stop_requested=True,
    )


@pytest.mark.parametrize(
    ("rows", "parts", "expected"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1]), (1, 1, [1]), (0, 3, [0])]
)
def test_parts_are_nearly_equal_and_never_empty(rows: int, parts: int, expected: list[int]) -> None:
    micro = list(split_microbatches(batch(rows), parts))
    assert [m.num_samples for m in micro] == expected
    assert torch.cat([m.kwargs["target"] for m in micro]).tolist() == list(range(max(rows, 1)))
    targets = [m.kwargs["target"].tolist() for m in micro]
    assert [m.args[0]["pair"][1].tolist() for m in micro] == targets


def test_only_the_last_part_reduces_and_tells_of_a_stop() -> None:
    micro = list(split_microbatches(batch(6), 3))
    assert (
        [m.is_last_microbatch for m in micro]
        == [m.stop_requested for m in micro]
        == [False, False, True]
    )


def test_a_batch_whose_first_dimension_is_not_the_batch_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"6 samples and a tensor of shape \(13,\).*batch dimension first"
    ):
        list(split_microbatches(batch(6, tensor_rows=13), 2))
    (whole,) = split_microbatches(batch(6, tensor_rows=13), 1)  # the cure that it names
    assert len(whole.args[0]["x"]) == 13
