"""The proof of buffers: differences by design, and differences that are errors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.verification.trajectory import changed_buffers, copy_buffers, training_reads


class Counted(nn.Module):
    """A model that counts samples, and has a running mean that only evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.mean.lerp_(x.detach().mean(0), 0.1)
        output: Tensor = self.layer(x if self.training else x - self.mean) + self.mask.exp()
        return output


class Scaled(nn.Module):
    """A model that divides by a running size of earlier batches, in training too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) / self.size.clone()
        self.measure(x)
        return output

    def measure(self, x: Tensor) -> None:
        self.size.mul_(0.9).add_(0.1 * x.detach().abs().mean())


class Coupled(Scaled):
    """A model whose running size has this batch in it, so that samples depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        self.measure(x)
        output: Tensor = self.layer(x) / self.size
        return output


class Stepped(nn.Module):
    """A model that counts calls, which are the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layer(x) / self.calls
        return output


class Versioned(nn.Module):
    """A model with a constant that no pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("version", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def doubled(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is right on one process, and wrong on two."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return F.mse_loss(output, target) * ranks


def test_buffers_that_each_rank_changes_differ_by_design() -> None:
    verdict = shoal.verify(Counted, batch, F.mse_loss, steps=2)
    assert verdict.verdict == "differs by design"
    beyond = {what for what, error in verdict.worst if error > 1e-10}
    assert beyond == {"buffer mean after 2 steps", "buffer seen after 2 steps"}
    assert verdict.reasons[0].startswith(
        "buffer seen after 2 steps and 1 more: the forward pass updates it"
    )


def test_buffers_excuse_no_gradient_where_training_does_not_read_them() -> None:
    verdict = shoal.verify(Counted, batch, doubled, steps=2)
    assert verdict.verdict == "differs"
    assert verdict.reasons == []


def test_gradients_may_differ_where_training_reads_what_it_wrote() -> None:
    verdict = shoal.verify(Scaled, batch, F.mse_loss, steps=2)
    assert verdict.verdict == "differs by design"
    assert "size" in verdict.reasons[0]


def test_a_model_that_reads_what_this_batch_wrote_is_refused() -> None:
    verdict = shoal.verify(Coupled, batch, F.mse_loss, steps=2)
    assert verdict.verdict == "refused"
    assert "no mean over samples" in verdict.reasons[0]


@pytest.mark.parametrize(("model_fn", "ranks", "accumulate"), [(Counted, 1, 1), (Stepped, 2, 1)])
def test_buffers_that_need_not_differ_are_exact(
    model_fn: type[nn.Module], ranks: int, accumulate: int
) -> None:
    verdict = shoal.verify(model_fn, batch, F.mse_loss, ranks=ranks, steps=2, accumulate=accumulate)
    assert verdict.verdict == "exact", verdict


def test_a_buffer_that_no_sample_changes_has_no_excuse() -> None:
    verdict = shoal.verify(Versioned, batch, F.mse_loss, "broken_strategies:BufferLost", steps=2)
    assert verdict.verdict == "differs"
    assert verdict.worst_parameter == "buffer version after 2 steps"


def test_what_a_forward_pass_changes_and_whether_training_reads_it() -> None:
    for make, names, read in [(Counted, ["seen", "mean"], False), (Scaled, ["size"], True)]:
        model = make().double()
        before, x = copy_buffers(model), torch.full((2, 4), 2.0).double()
        model(x)
        assert changed_buffers(model, before) == names
        assert training_reads(model, before, lambda m=model, x=x: m(x).sum()) is read
        assert changed_buffers(model, before) == names
