"""`GlobalDraws`: ranks with shares of a batch draw the rows that one device draws."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.draws import GlobalDraws, Rows, digest_of_generators
from shoal.errors import UsageError

Draw = Callable[[Tensor], Tensor]
CPU = torch.device("cpu")

DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of tokens": lambda x: F.dropout(x.reshape(-1, 2), 0.3).view(len(x), -1),
    "dropout of channels": lambda x: F.dropout2d(x.view(len(x), 3, 2, 1), 0.5).flatten(1),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "channels last": lambda x: F.dropout(
        x.view(len(x), 3, 2, 1).contiguous(memory_format=torch.channels_last), 0.3
    ).flatten(1),
    "time first": lambda x: F.dropout(x[:, :2].T.contiguous(), 0.3).T,
    "attention": lambda x: F.scaled_dot_product_attention(
        x.view(len(x), 1, 3, 2), x.view(len(x), 1, 3, 2), x.view(len(x), 1, 3, 2), dropout_p=0.5
    ).flatten(1),
    "noise": lambda x: x + torch.randn_like(x),
    "randn": lambda x: torch.randn(len(x), 6),
    "rand": lambda x: torch.rand(x.shape),
    "randint": lambda x: torch.randint(0, 1000, (len(x),)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.abs()[:, :1]),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "uniform_": lambda x: torch.empty(len(x), 3, 2).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty(len(x), 5).exponential_(),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "multinomial with replacement": lambda x: torch.multinomial(x.softmax(1), 3, replacement=True),
    "depth": lambda x: x * torch.empty(len(x), 1).bernoulli_(0.8) / 0.8,
    "own generator": lambda x: torch.randn(
        len(x), 2, generator=torch.Generator().manual_seed(1)
    ),
}  # fmt: skip
SHARES = [[6, 6], [7, 5], [5, 4, 3], [11, 1]]


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_shares_draw_the_rows_of_one_device(name: str, shares: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 6)
    torch.manual_seed(1)
    draws = DRAWS[name]
    draws(x)
    expected = draws(x)  # a second time, so that a generator in a wrong state shows
    digest = digest_of_generators(CPU)
    first = 0
    for count in shares:
        torch.manual_seed(1)
        part = x[first : first + count]
        with GlobalDraws(Rows(first, count, 12)):
            draws(part)
            actual = draws(part)
        assert torch.equal(actual, expected[first : first + count])
        assert digest_of_generators(CPU) == digest
        first += count


def test_layers_draw_as_on_one_device() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.3, batch_first=True)
    x = torch.randn(5, 4, 4)
    torch.manual_seed(1)
    expected = lstm(layer(x))[0]
    for first, count in ((0, 3), (3, 2)):
        torch.manual_seed(1)
        with GlobalDraws(Rows(first, count, 5)):
            actual = lstm(layer(x[first : first + count]))[0]
        assert torch.allclose(actual, expected[first : first + count], atol=1e-6)


def test_tensors_without_rows_are_drawn_whole() -> None:
    torch.manual_seed(1)
    expected = torch.rand(()), torch.randn(7), torch.rand(4, 9), torch.randperm(7)
    torch.manual_seed(1)
    with GlobalDraws(Rows(0, 3, 5)):
        actual = torch.rand(()), torch.randn(7), torch.rand(4, 9), torch.randperm(7)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: torch.randperm(3), "randperm over the 3 samples.*over all 5"),
        (lambda: torch.multinomial(torch.ones(3), 1), "multinomial over the 3 samples"),
        (lambda: F.rrelu(torch.ones(3, 2), training=True), "rrelu_with_noise of shape"),
        (lambda: torch.poisson(torch.ones(3, 2)), "poisson of shape"),
        (lambda: torch.bernoulli(torch.ones(3), out=torch.ones(3)), "with out="),
    ],
)
def test_draws_that_need_other_rows_are_refused(draw: Callable[[], Tensor], message: str) -> None:
    with GlobalDraws(Rows(0, 3, 5)), pytest.raises(UsageError, match=message):
        draw()


def test_what_draws_nothing_is_let_through() -> None:
    x = torch.ones(3, 2)
    with GlobalDraws(Rows(0, 3, 5)):
        F.rrelu(x)
        F.dropout(x, 0.0)
        F.dropout(x, training=False)
        nn.LSTM(2, 2)(x)
