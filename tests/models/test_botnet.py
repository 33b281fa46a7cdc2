"""BoTNet: the published number of parameters, and attention that knows relative positions."""

import math

import pytest
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.models import build
from shoal.models.resnets import RelativeAttention2d


def test_it_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = build("botnet50", 1000, (3, 224, 224), {})
    assert sum(p.numel() for p in model.parameters()) == 20_859_176  # 20.8 million in the paper


def test_it_trains_on_images_of_other_sizes_and_channels() -> None:
    torch.manual_seed(0)
    model = build("botnet50", 5, (1, 40, 24), {})
    logits = model(torch.randn(2, 1, 40, 24))
    assert logits.shape == (2, 5)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_logit_is_the_query_times_the_key_and_both_offsets() -> None:
    torch.manual_seed(0)
    height, width, channels, heads = 3, 2, 4, 2
    attention = RelativeAttention2d(channels, height, width, heads).double()
    x = torch.randn(1, channels, height, width, dtype=torch.float64)
    query, key, value = attention.to_qkv(x)[0].chunk(3)
    depth = channels // heads
    expected = torch.empty_like(x[0])
    positions = [(row, column) for row in range(height) for column in range(width)]
    for head in range(heads):
        own = slice(head * depth, (head + 1) * depth)
        for row, column in positions:

            def logit(i: int, j: int, place: tuple[int, int] = (row, column), own: slice = own):
                offsets = attention.row_offsets[i - place[0] + height - 1]
                offsets = offsets + attention.column_offsets[j - place[1] + width - 1]
                asked: Tensor = query[own, place[0], place[1]]
                return asked @ (key[own, i, j] + offsets) / math.sqrt(depth)

            shares = torch.stack([logit(i, j) for i, j in positions]).softmax(0)
            values = torch.stack([value[own, i, j] for i, j in positions])
            expected[own, row, column] = shares @ values
    assert torch.allclose(attention(x)[0], expected, rtol=1e-12)


def test_samples_that_are_no_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="botnet50"):
        build("botnet50", 5, (7,), {})
