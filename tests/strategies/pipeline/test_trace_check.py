"""A tracer sees less than the model does: what it misses is kept whole, or refused, and nothing
is left changed.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import StrategyRefused, UsageError
from shoal.strategies.pipeline.fx_trace import Traced, trace_model
from shoal.strategies.pipeline.stage_module import collect
from shoal.strategies.pipeline.steps import steps_of

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Row(nn.Module):
    """A body between two layers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(8, 8), body, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.body(self.first(x)))
        return output


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.layer(x)
        return hidden * x


class Rounding(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Rounding.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return output


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x).float()


class Inner(nn.Module):
    """May be in evaluation mode while the model is not, and may have hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale, self.steps = nn.Linear(8, 8), nn.Linear(8, 8), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.dropout(self.one(x) * self.scale, 0.5, self.training))


def called(graph: Traced) -> list[str]:
    return [str(step.target) for step in steps_of(graph.training) if step.op == "call_module"]


@pytest.mark.parametrize("body", [Frozen, Rounded, Cast])
def test_code_that_switches_autograd_or_autocast_stays_whole(body: Callable[[], nn.Module]) -> None:
    assert called(trace_model(Row(body()), 1, frozenset(), (ROWS,))) == ["first", "body", "last"]
    with pytest.raises(
        StrategyRefused,
        match=r"torch\.no_grad, under torch\.autocast or in a torch\.autograd\.Funct",
    ):
        trace_model(body(), 1, frozenset())


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_module_with_hooks_stays_whole(kind: str) -> None:
    model = Row(Inner())
    getattr(model.body, f"register_{kind}_hook")(lambda *_: None)
    assert called(trace_model(model, 1, frozenset(), (ROWS,))) == ["first", "body", "last"]


class Detached(nn.Module):
    """Gives another gradient to a tracer's stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden.detach() if isinstance(hidden, Tensor) else hidden)


class Noted(nn.Module):
    """A block that leaves a part of the loss where the model finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aside = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.aside = y.square().mean() if self.training else torch.zeros(())
        return x + y


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noted() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aside = torch.zeros(())
        for block in self.blocks:
            x = block(x)
            aside = aside + block.aside
        return x, aside


def test_other_gradients_and_outputs_in_training_are_refused() -> None:
    with pytest.raises(
        StrategyRefused, match=r"gives first\.bias a gradient, unlike the model itself"
    ):
        trace_model(Detached(), 1, frozenset(), (ROWS,))
    with pytest.raises(StrategyRefused, match="have modules return what others need"):
        trace_model(Summing(), 1, {"blocks.0", "blocks.1"}, (ROWS,))


def test_a_part_in_evaluation_mode_stays_in_it_and_a_change_is_refused() -> None:
    model = Row(Inner())
    model.body.eval()
    graph = trace_model(model, 1, frozenset(), (ROWS,))
    assert "body.one" in called(graph)
    dropout = next(node for node in graph.training.nodes if node.target is F.dropout)
    assert False in (*dropout.args, *dropout.kwargs.values())
    graph.constants.check_unchanged()
    model.eval()
    graph.constants.check_unchanged()
    model.train()
    with pytest.raises(
        UsageError, match=r"body is in training mode, and its stages were made for evaluation mode"
    ):
        graph.constants.check_unchanged()


def test_attributes_and_hooks_that_come_too_late_are_refused() -> None:
    model = Row(Inner())
    constants = trace_model(model, 1, frozenset(), (ROWS,)).constants
    model.body.scale = 0.5
    with pytest.raises(UsageError, match=r"body\.scale was 1\.0 in run\.prepare and is 0\.5 now"):
        constants.check_unchanged()
    model.body.scale = 1.0
    constants.check_unchanged()
    model.body.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="body has hooks now"):
        constants.check_unchanged()


class Counting(nn.Module):
    """In itself, or in a module of its own."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.layer, self.assigns = nn.Linear(8, 8), assigns
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.number = self.number + 1
        else:
            self.number += 1
        output: Tensor = self.layer(x)
        return output


@pytest.mark.parametrize("assigns", [True, False])
def test_counters_are_left_as_they_were(assigns: bool) -> None:
    inside, outside = Row(Counting(assigns)), Counting(assigns)
    tried = trace_model(inside, 1, frozenset(), (ROWS,)).checked
    assert tried is not None
    assert tried.mutated_buffers == {id(inside.body.number)}
    assert not tried.hooks
    with pytest.raises(StrategyRefused, match="writes into buffers of its own"):
        trace_model(outside, 1, frozenset(), (ROWS,))
    assert inside.body.number == outside.number == 0


class Tables(nn.Module):
    """Tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(8, 8), nn.Linear(8, 8), torch.full((8,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x) * torch.tensor(0.5) * self.table)
        return output


def test_tensors_that_are_no_buffers_are_found_by_the_stages_and_in_no_state_dict() -> None:
    model = Tables()
    graph = trace_model(model, 1, frozenset(), (ROWS,))
    assert [name for name in vars(model) if "_constant" in name] == ["_tensor_constant0"]
    kept = collect(model, {"first", "last", "table", "_tensor_constant0"})
    assert kept.state_dict().keys() == model.state_dict().keys()
    assert graph.added == ("_tensor_constant0",)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, layer = (
            nn.Embedding(17, 8),
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        )
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(self.embed(x), src_key_padding_mask=x == 0)
        return output


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_torchs_transformer_is_no_reason_to_refuse_it() -> None:
    tokens = torch.ones(4, 6, dtype=torch.long)
    tokens[:, 4:] = 0
    assert "layers.layers.1" in called(
        trace_model(Padded(), 1, {"layers.layers.0", "layers.layers.1"}, (tokens,))
    )
