"""Predictions of a data set, in its order, under every strategy and on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

SAMPLES, BATCH = 23, 5  # five batches, the last of three samples
LINES = [
    (7, ["ddp"]),
    (3, ["zero3"]),
    (2, ["tensor=2", "pipeline=2", "server=1"]),
    pytest.param(4, ["pipeline=2,zero1"], marks=pytest.mark.slow),
]


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(SAMPLES))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    layers = (
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(8, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    )
    return nn.Sequential(*layers).double()


def predicts(line: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return named and bare predictions of a model that was trained for no step."""
    run, model = shoal.init(line, announce=str), net()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def compute(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = model(x)
        return {"scores": scores, "best": scores.argmax(1), "odd": y % 2 == 1, "index": y}

    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    assert model.training
    named, bare = run.predict(compute, loader), run.predict(lambda _, y: y * 2, loader)
    assert model.training
    return named, bare


@pytest.mark.parametrize(("ranks", "lines"), LINES)
def test_every_sample_comes_once_in_the_order_of_the_data_set(ranks: int, lines: list[str]) -> None:
    x, y = samples().tensors
    model = net().eval()
    with torch.no_grad():
        scores = model(x)
    for results in world.run(ranks, in_turn, predicts, *zip(lines, strict=True)):
        for named, bare in results:
            torch.testing.assert_close(named["scores"], scores, rtol=0, atol=1e-10)
            assert torch.equal(named["best"], scores.argmax(1))
            assert torch.equal(named["odd"], y % 2 == 1)
            assert torch.equal(named["index"], y)
            assert torch.equal(bare, y * 2)
            assert named["scores"].device.type == "cpu"


class Spread:
    """A metric with the calls of torchmetrics', which is no sum over samples."""

    def __init__(self) -> None:
        self.rows = [torch.zeros(1)]

    def reset(self) -> None:
        self.rows = []

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.rows.append(scores.sum(1) * target)

    def compute(self) -> Tensor:
        return torch.cat(self.rows).median()


def measures(line: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metrics of values in a tuple and by name."""
    run, model = shoal.init(line, announce=str), net()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader, metrics = DataLoader(samples(), batch_size=BATCH), {"spread": Spread()}
    by_place = run.evaluate(lambda x, y: (model(x), y), loader, metrics=metrics)
    by_name = run.evaluate(lambda x, y: {"target": y, "scores": model(x)}, loader, metrics=metrics)
    return by_place, by_name


@pytest.mark.parametrize(("ranks", "lines"), [(3, ["ddp"]), (2, ["zero3", "pipeline=2"])])
def test_metrics_see_every_sample_once(ranks: int, lines: list[str]) -> None:
    x, y = samples().tensors
    with torch.no_grad():
        expected = (net().eval()(x).sum(1) * y).median()
    for results in world.run(ranks, in_turn, measures, *zip(lines, strict=True)):
        for by_place, by_name in results:
            torch.testing.assert_close(by_place, {"spread": expected}, rtol=0, atol=1e-10)
            assert by_place == by_name


@pytest.mark.parametrize(
    "metrics", [Spread(), [Spread()], {"spread": torch.median}, {"spread": Spread}, {}]
)
def test_what_is_no_dict_of_metrics_is_refused(metrics: Any) -> None:
    with pytest.raises(UsageError, match="is no dict of metrics with reset, update and compute"):
        shoal.init(announce=str).evaluate(lambda x, y: (x, y), [], metrics=metrics)


def test_a_number_in_the_place_of_rows_is_refused_by_the_call_that_was_made() -> None:
    loader = DataLoader(samples(), batch_size=BATCH)
    with pytest.raises(UsageError, match="evaluate: compute_sums, with metrics, returned a Tensor"):
        shoal.init(announce=str).evaluate(
            lambda x, y: (x.sum(), y), loader, metrics={"spread": Spread()}
        )


def test_a_list_of_ready_batches_and_a_model_that_was_not_prepared_will_do() -> None:
    x, _ = samples().tensors
    model = net()
    scores = shoal.init(announce=str).predict(lambda x: model(x), list(x.split(4)), model)
    with torch.no_grad():
        torch.testing.assert_close(scores, model.eval()(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda x, y: x.mean(), r"returned a Tensor of shape \(\) for a batch of 5 samples"),
        (lambda x, y: {"s": x.T}, r"a Tensor as 's' of shape \(6, 5\) for a batch of 5 samples"),
        (lambda x, y: [x, y], "returned a list; it must return a tensor, or a dict of tensors"),
        (lambda x, y: {}, "compute returned an empty dict"),
        (lambda x, y: {1: x}, "it must return a tensor, or a dict of tensors by name"),
        (
            lambda x, y: x[:, : len(x)],
            r"\(rows, 3\) for one batch, and .*\(rows, 5\) for the first",
        ),
        ("scores", "predict was given a str, and takes a function of a batch that returns a row"),
    ],
)
def test_what_has_no_row_for_each_sample_is_refused(compute: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shoal.init(announce=str).predict(compute, DataLoader(samples(), batch_size=BATCH))


def pads_by_batch() -> None:
    run = shoal.init(announce=str)
    run.predict(lambda x, y: x[:, : len(x)], DataLoader(samples(), batch_size=BATCH))


@pytest.mark.slow
def test_a_shape_that_one_rank_alone_finds_ends_all_ranks_with_the_cure() -> None:
    with pytest.raises(LaunchError, match=r"rows of one shape: pad them"):
        world.run(2, pads_by_batch, timeout_s=30)


def calls() -> tuple[Tensor, Tensor]:
    """Return what trained models compute in `run.call`, and what their whole weights do."""
    run, model = shoal.init("pipeline=2", announce=str), net().eval()
    x = samples().tensors[0]
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.forward_backward(lambda x: model(x).square().mean(), x)
    optimizer.step()
    whole = net().eval()
    whole.load_state_dict(run.weights())
    return run.call(lambda rows: model(rows), x), whole(x).detach()


class Decoder(nn.Module):
    """Writes by its layers, and not by its own forward function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.cell, self.head = nn.GRUCell(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x))

    def decode(self, x: Tensor) -> Tensor:
        return torch.stack([x := self.head(self.cell(x)) for _ in range(3)])


def decodes() -> tuple[Tensor, Tensor, str]:
    run, model, x = shoal.init("zero3", announce=str), Decoder(), torch.ones(2, 3).double()
    expected = model.decode(x).detach()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError) as refused, torch.no_grad():
        model.decode(x)
    return run.call(model.decode, x), expected, str(refused.value)


def test_shards_are_called_by_a_method_in_run_call_which_the_refusal_of_a_bare_call_names() -> None:
    for found, expected, words in world.run(2, decodes):
        assert torch.allclose(found, expected, rtol=1e-10)
        assert "run.call(function, *args), on all ranks" in words


def test_a_pipeline_is_called_outside_of_a_step() -> None:
    for found, expected in world.run(2, calls):
        assert not found.requires_grad
        assert torch.allclose(found, expected, rtol=1e-10)


def test_an_evaluation_leaves_every_module_in_the_mode_that_it_had() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    model[0].eval()
    loader = DataLoader(samples(), batch_size=BATCH)
    found = shoal.init(announce=str).evaluate(lambda x, y: {"ones": (y >= 0).sum()}, loader, model)
    assert found == {"samples": SAMPLES, "ones": SAMPLES}
    assert [module.training for module in model.modules()] == [True, False, True]


def evaluates_own_part(call: str) -> str:
    """Return the error of an evaluation of samples that each rank has drawn for itself."""
    run, model = shoal.init("ddp", announce=str), net()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    part = torch.utils.data.random_split(samples(), [18, 5])[1]
    with pytest.raises(UsageError) as raised:
        getattr(run, call)(lambda x, y: {"index": y}, DataLoader(part, batch_size=1))
    return str(raised.value)


class Cached(torch.utils.data.Dataset):
    """Keeps what was read of it, as each rank reads other samples."""

    def __init__(self) -> None:
        self.kept = torch.zeros(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.kept[index] = index + 1.0
        return self.kept[index]


def evaluates_twice() -> list[dict[str, float]]:
    run, loader = shoal.init("ddp", announce=str), DataLoader(Cached(), batch_size=2)
    return [run.evaluate(lambda x: {"sum": x.sum()}, loader) for _ in range(2)]


def test_a_data_set_may_keep_what_a_rank_has_read_of_it() -> None:
    expected = {"samples": SAMPLES, "sum": SAMPLES * (SAMPLES + 1) / 2}
    assert world.run(2, evaluates_twice) == [[expected] * 2] * 2


def test_a_part_of_the_data_that_differs_on_ranks_is_refused() -> None:
    for results in world.run(2, in_turn, evaluates_own_part, ("evaluate",), ("predict",)):
        for call, said in zip(("evaluate", "predict"), results, strict=True):
            assert said.startswith(f"{call}: Subset or its sampler is not the same on all ranks")
