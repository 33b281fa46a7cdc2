"""Labels that a loss reads from around it are not divided: one sentence says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import world

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(8) % 3
SEQUENCES = torch.randn(8, 9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sentences(strategy: str, accumulate: int) -> list[str]:
    """Return what is said of a captured label, and of a captured weight that is no label."""
    found = []
    for captures_labels in (True, False):
        torch.manual_seed(0)
        run = shoal.init(strategy, accumulate=accumulate, precision="fp64", announce=lambda _: None)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        x, labels = run.share((ROWS, LABELS))
        weights = torch.ones(len(x), dtype=torch.float64)
        net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def loss_of_captured(x: Tensor, net: nn.Module = net, labels: Tensor = labels) -> Tensor:
            return F.cross_entropy(net(x), labels)

        def faulty(x: Tensor, net: nn.Module = net, weights: Tensor = weights) -> Tensor:
            raise ValueError("another error")

        with pytest.raises((UsageError, ValueError)) as raised:
            run.forward_backward(loss_of_captured if captures_labels else faulty, x)
        found.append(f"{raised.type.__name__}: {raised.value}")
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [
        ("single", 1, 2),
        pytest.param("ddp", 2, 2, marks=pytest.mark.slow),
        pytest.param("zero3", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_labels_of_the_whole_batch_that_are_no_argument_are_named(
    strategy: str, ranks: int, accumulate: int
) -> None:
    for captured, other in world.run(ranks, sentences, strategy, accumulate):
        assert captured.startswith(f"{UsageError.__name__}: ")
        assert f"compute_loss reads labels of shape ({8 // ranks},) from around it" in captured
        assert "run.forward_backward(compute_loss, ..., labels)" in captured
        assert other == "ValueError: another error"


def sentence_in_a_pipeline(microbatches: int) -> str:
    run = shoal.init(
        f"pipeline=2,microbatches={microbatches}", precision="fp64", announce=lambda _: None
    )
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = torch.utils.data.TensorDataset(ROWS, LABELS)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    net, _, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    [(x, y)] = loader
    with pytest.raises(UsageError) as raised:
        run.forward_backward(lambda x: F.cross_entropy(net(x), y), x)
    return str(raised.value)


def test_so_are_labels_that_the_loss_of_a_pipeline_captures() -> None:
    for said in world.run(2, sentence_in_a_pipeline, 4):
        assert "compute_loss reads y of shape (8,) from around it" in said


def words_of_recurrent(kind: str) -> tuple[str, list[str]]:
    """Return an error and its notes, of a network that is told the size of the whole batch."""
    run = shoal.init("ddp", precision="fp64", announce=lambda _: None)
    net = nn.RNN(6, 5, batch_first=True).double()
    rows = 4 if kind == "carried state" else 8
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    states = [torch.zeros(1, rows, 5, dtype=torch.float64)]

    def with_a_state(x: Tensor) -> Tensor:
        return net(x, states[0])[0].mean()

    def with_a_size(x: Tensor) -> Tensor:
        return net(x)[0].view(8, -1, 5).mean(1).mean()

    x = run.share(ROWS.view(8, 1, 6))
    with pytest.raises((UsageError, RuntimeError)) as raised:
        run.forward_backward(with_a_size if kind == "size" else with_a_state, x)
    return str(raised.value), getattr(raised.value, "__notes__", [])


def test_a_state_that_was_made_for_the_whole_batch_is_named() -> None:
    for said, _ in world.run(2, words_of_recurrent, "state"):
        assert "compute_loss reads states[0] of shape (1, 8, 5) from around it" in said
        assert "which was made for 8 samples" in said
        assert "torch.zeros(1, len(x), ...)" in said


def test_so_is_a_state_of_this_rank_which_the_trial_of_the_loss_cannot_divide() -> None:
    for said, _ in world.run(2, words_of_recurrent, "carried state"):
        assert "compute_loss reads states[0] of shape (1, 4, 5) from around it" in said
        assert "state.transpose(0, 1)" in said


def words_of_adversary() -> str:
    """Return the error about labels that a loop makes for the size of the whole batch."""
    run = shoal.init("ddp", precision="fp64", announce=lambda _: None)
    net = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()).double()
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    real = torch.ones(8, 1, dtype=torch.float64)
    with pytest.raises(UsageError) as raised:
        run.forward_backward(lambda x: F.binary_cross_entropy(net(x), real), run.share(ROWS))
    return str(raised.value)


def test_labels_that_were_made_for_the_batch_of_all_ranks_are_to_be_made_for_this_rank() -> None:
    for said in world.run(2, words_of_adversary):
        assert "compute_loss reads real of shape (8, 1) from around it: as many rows as the" in said
        assert "torch.ones(len(x), 1) in place of torch.ones(8, 1)" in said


def carried(strategy: str, accumulate: int) -> list[float]:
    """Train a network whose states go from batch to batch, with their samples first."""
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(3)
    net = nn.LSTM(6, 5, batch_first=True).double()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    x = run.share(SEQUENCES)
    states = [torch.zeros(len(x), 1, 5, dtype=torch.float64)] * 2

    def compute_loss(x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        out, new = net(x, [state.transpose(0, 1).contiguous() for state in states])
        return (out**2).mean(), [state.detach().transpose(0, 1) for state in new]

    losses = []
    for begin in (0, 3, 6):
        loss, states = run.forward_backward(compute_loss, x[:, begin : begin + 3], states)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("zero3", 2)])
def test_states_with_their_samples_first_go_from_batch_to_batch_as_on_one_device(
    strategy: str, accumulate: int
) -> None:
    expected = carried("single", 1)
    for losses in world.run(2, carried, strategy, accumulate):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_an_error_of_code_that_knows_the_whole_batch_tells_how_many_samples_it_was_given() -> None:
    for said, notes in world.run(2, words_of_recurrent, "size"):
        assert "invalid for input of size" in said
        assert any("its 4 samples (of 8 in the batch)" in note for note in notes)


def hardest(strategy: str, accumulate: int) -> float:
    """Return the loss of the two samples of the batch with the largest losses."""
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(net(x), y, reduction="none")
        return run.gather(losses).topk(2).values.mean()

    return run.forward_backward(compute_loss, *run.share((ROWS, LABELS))).item()


def test_a_loss_of_two_samples_takes_them_from_gathered_rows_where_parts_have_one() -> None:
    expected = hardest("single", 1)
    assert world.run(2, hardest, "ddp", 4) == pytest.approx([expected] * 2, rel=1e-12)


GRAPH = (torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.4).double()


class GraphNet(nn.Module):
    """Two layers that mix the rows of a batch by the adjacency of a graph."""

    def __init__(self, graph: Tensor | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        if graph is not None:
            self.register_buffer("graph", graph)

    def forward(self, x: Tensor, graph: Tensor | None = None) -> Tensor:
        graph = self.graph if graph is None else graph
        out: Tensor = graph @ self.second(torch.tanh(graph @ self.first(x)))
        return out


def train_with_graph(place: str, graph: Tensor, strategy: str, accumulate: int) -> None:
    run = shoal.init(strategy, accumulate=accumulate, precision="fp64", announce=lambda _: None)
    net = GraphNet(graph if place == "buffer" else None).double()
    rows, labels = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 3
    data = torch.utils.data.TensorDataset(rows, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, batches = run.prepare(net, optimizer, loader)

    def compute_loss(x: Tensor, y: Tensor, given: Tensor | None = None) -> Tensor:
        return F.cross_entropy(net(x, graph if given is None else given), y)

    for x, y in batches:
        if place == "batch":
            run.forward_backward(compute_loss, x, y, graph, rows=len(x))
        else:
            run.forward_backward(compute_loss, x, y)


def sentences_about_graphs(strategy: str, accumulate: int) -> list[str]:
    """Return what is said of a sparse graph in the batch, around the loss, and in a buffer."""
    found = []
    for place in ("batch", "around", "buffer"):
        for graph in (GRAPH.to_sparse(), GRAPH.to_sparse_csr()):
            with pytest.raises(UsageError) as raised:
                train_with_graph(place, graph, strategy, accumulate)
            found.append(str(raised.value))
    return found


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        ("pipeline=2,microbatches=2", 1),
        ("pipeline=2,microbatches=1", 1),
        ("pipeline=2,microbatches=1", 2),
    ],
)
@pytest.mark.slow
def test_a_sparse_graph_that_would_be_cut_into_rows_is_refused(
    strategy: str, accumulate: int
) -> None:
    for said in world.run(2, sentences_about_graphs, strategy, accumulate):
        assert all("a sparse tensor of shape (12, 12) is in a batch" in each for each in said[:2])
        assert all("graph, a sparse tensor of shape (12, 12), from" in each for each in said[2:4])
        assert all("graph: a sparse buffer cannot be sent" in each for each in said[4:])
