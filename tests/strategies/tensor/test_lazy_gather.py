"""Code of the user never sees a shard: the layer stays replicated, the shard is gathered, or
the use is refused.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from huggingface_shaped_models import bert
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.strategies.loss_terms import Counted, counted
from shoal.strategies.tensor.strategy import TensorParallel, tensor_plan
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy
from shoal.verification import Experiment
from tests.harness.in_turn import in_turn
from tests.matrix.cases import WORDS, gpt_untied, token_loader

HOOKS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


def no_op(*_: object) -> None:
    pass


def styles(model: nn.Module, **options: str) -> dict[str, str]:
    return tensor_plan(model, TensorParallel(2, **options)).parallel_styles()


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class Pairs(nn.Module):
    """Three pairs, each in another structure of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(8, 12), nn.ReLU()), nn.Linear(12, 8)
        self.three, self.act, self.four = nn.Linear(8, 12), Act(), nn.Linear(12, 8)
        self.five, self.norm = (
            nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)),
            nn.LayerNorm(8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.four(self.act(self.three(self.norm(self.two(self.one(x))))))
        found: Tensor = self.five(self.norm(x))
        return found


@pytest.mark.parametrize("hook", HOOKS)
def test_a_pair_stays_whole_where_a_slice_comes_by_a_hook(hook: str) -> None:
    assert set(styles(Pairs())) == {"one.0", "two", "three", "four", "five.0", "five.2"}
    model = Pairs()
    # The last two see full tensors only.
    for seen in (model.one, model.act, model.five, model):
        getattr(seen, hook)(no_op)
    assert set(styles(model)) == {"five.0", "five.2"}


def late_hook(seen: str, strategy: str = "tensor=2") -> str:
    """Return the error of a step after a hook on a module came behind `prepare`."""
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model = Pairs()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    name, _, hook = seen.partition(" ")
    getattr(model.get_submodule(name), hook or "register_forward_hook")(no_op)
    x = run.share(torch.randn(4, 8))
    try:
        run.forward_backward(lambda x: model(x).square().mean(), x)
    except UsageError as error:
        return str(error)
    return ""


def test_a_hook_that_comes_later_where_a_slice_goes_by_is_refused() -> None:
    cures = {
        "one.0": "one.0",
        "one": "one.0",
        "act": "three",
        "five.1 register_full_backward_hook": "five.0",
        "four register_forward_pre_hook": "three",
    }
    calls = [(seen, f"tensor=2{c}") for seen, cure in cures.items() for c in ("", f",whole={cure}")]
    for found in world.run(2, in_turn, late_hook, *calls):
        for (seen, cure), text, by_the_cure in zip(
            cures.items(), found[::2], found[1::2], strict=True
        ):
            name = seen.partition(" ")[0]
            assert text.startswith(f"a hook was registered on {name} after run.prepare")
            assert text.endswith(f"tensor=2,whole={cure}.")
            assert by_the_cure == ""


def test_a_hook_that_comes_later_where_outputs_are_whole_is_not() -> None:
    calls = ("four",), ("norm",), ("five.0 register_forward_pre_hook",)
    assert world.run(2, in_turn, late_hook, *calls) == [["", "", ""]] * 2


class KeepsActivations(nn.Module):
    """Keeps one activation as an attribute, one in a list, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm, self.seen = nn.LayerNorm(8), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.layers
        self.hidden = torch.relu(a(x))
        x = self.norm(b(self.hidden))
        self.seen.append(torch.relu(c(x)))
        found: Tensor = f(torch.relu(e(self.norm(d(self.seen[-1])))))
        return found


def test_a_pair_stays_whole_where_somebody_keeps_what_lies_between() -> None:
    model = KeepsActivations()
    assert set(styles(model)) == {"layers.4", "layers.5"}
    assert "hidden" not in vars(model)


def test_attention_stays_whole_where_hooks_lie_inside() -> None:
    model = bert()
    model.get_submodule("h.0.attention.self").register_forward_hook(no_op)
    made = tensor_plan(model, TensorParallel(2))
    assert "h.0.attention.self.query" not in made.parallel_styles()
    assert (
        made.replicated["h.0.attention.self.query"]
        == "hooks of its self would see a slice of what goes by"
    )


def test_what_has_hooks_on_a_parameter_or_on_words_stays_whole() -> None:
    model = gpt_untied()
    model.blocks[0].mlp.up.weight.register_hook(lambda gradient: gradient * 0.1)
    model.head.register_full_backward_hook(no_op)
    made = tensor_plan(model, TensorParallel(2))
    assert (
        made.replicated["blocks.0.mlp.up"]
        == "its weight has hooks, which would not know of a slice"
    )
    assert {"blocks.0.mlp.down", "head"} <= set(made.replicated)
    assert "blocks.1.mlp.up" in made.parallel_styles()


class BroadcastGate(nn.Module):
    """A gate of one value, which is broadcast over all hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 1), nn.Linear(12, 8)
        self.after = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(self.down(self.up(x) * torch.sigmoid(self.gate(x))))
        return found


def test_a_gate_that_is_spread_over_the_units_leaves_its_pair_whole() -> None:
    made = tensor_plan(BroadcastGate(), TensorParallel(2))
    assert set(made.parallel_styles()) == {"after.1", "after.2"}
    assert made.replicated["gate"] == "its 1 outputs meet 12 of another layer"


class Attention(nn.Module):
    """Returns its weights too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.head_dim = 4

    def forward(self, x: Tensor, before: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in layers)
        weights = (query @ key.transpose(-2, -1) + before).softmax(-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(-2)), weights


class WeightsAreRead(nn.Module):
    """Tokens that attend to no other; weights of attention, which is whole then, that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.one, self.two = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(13, 13, dtype=torch.bool).triu(1)
        hidden = self.layer(
            self.embed(x),
            src_mask=later,
            src_key_padding_mask=torch.arange(13).expand(len(x), -1) < 3,
        )
        hidden, weights = self.one(hidden)
        more, _ = self.two(hidden, weights)
        logits: Tensor = self.head(hidden + more * weights.square().sum((1, 3)).unsqueeze(-1))
        return logits


def loss_that_reads_all_logits(logits: Tensor, target: Tensor) -> Counted:
    with torch.no_grad():
        logits.softmax(-1)
    counts = target != -100
    total = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return counted(total + 0.1 * (logits.logsumexp(-1).square() * counts).sum(), counts.sum())


@pytest.mark.filterwarnings("ignore:.*every rank gathers and computes all of it")
def test_what_is_seen_of_slices_is_the_whole() -> None:
    check_strategy(
        "tensor=2", 2, Experiment(WeightsAreRead, token_loader, loss_that_reads_all_logits, steps=2)
    )


def evaluate_with_padding() -> str:
    run = shoal.init("tensor=2", announce=lambda _: None)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 5, 8)
    model, _, _ = run.prepare(model, optimizer, DataLoader(TensorDataset(x, x), batch_size=4))
    padded = torch.arange(5).expand(4, -1) > 3
    warnings.simplefilter("ignore")  # in this rank: torch says that nested tensors may change
    with torch.no_grad(), pytest.raises(UsageError) as refusal:
        model.eval()(x, src_key_padding_mask=padded)
    return str(refusal.value)


def test_nested_tensors_are_refused() -> None:
    assert all(
        "Make it with enable_nested_tensor=False" in message
        for message in world.run(2, evaluate_with_padding)
    )
