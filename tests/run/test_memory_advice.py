"""An error of a GPU without memory says which settings of this very run would help."""

from typing import Any

import pytest
import torch
from minimal_script import parts
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.run.supervised import supervised
from shoal.testing import world


class Full(nn.Module):
    """A layer on a device whose memory is full."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def told(strategy: str, **settings: Any) -> str:
    """Return the error of a step on this rank, a class of torch's own."""
    run = shoal.init(strategy, announce=lambda _: None, guards=False, **settings)
    model, _, loader = run.prepare(*parts(Full(), batch_size=8))
    x, y = next(iter(loader))
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
    return str(caught.value)


def test_torch_s_own_words_stay_and_the_cheapest_cure_comes_first() -> None:
    text = told("single")
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.\nIn this step")
    assert "8 samples in parts of 8" in text
    cures = ["precision='bf16'", "accumulate=2, for parts of 4", "recompute", "offload=true"]
    places = [text.index(cure) for cure in cures]
    assert places == sorted(places)


def test_settings_that_are_there_already_are_not_advised() -> None:
    text = told("recompute,unit=Linear,single", accumulate=2, precision="bf16")
    assert "accumulate=4, for parts of 2" in text
    assert "bf16" not in text
    assert "recompute" not in text


def test_a_sample_at_a_time_cannot_be_divided_further() -> None:
    assert "accumulate=" not in told("single", accumulate=8)


def advice_of_strategies() -> dict[str, str]:
    return {name: told(name) for name in ("ddp", "zero1", "zero2", "zero3", "zero3,offload=true")}


def test_ranks_are_advised_to_share_what_each_of_them_holds() -> None:
    for found in world.run(2, advice_of_strategies):
        assert "zero2 or zero3 in the place of ddp, with a share of 1/2" in found["ddp"]
        assert "zero3 in the place of zero1" in found["zero1"]
        assert "zero2,offload=true" in found["zero2"]
        assert "zero3,offload=true" in found["zero3"]
        assert "offload" not in found["zero3,offload=true"]
