"""`run.backward(loss)`: a loss that the loop has computed trains as on one device."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, StrategyRefused, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

SAMPLES = 23  # the last batch is a short one


def prepared(strategy: str, batch_size: int = 6, **settings: Any) -> tuple[Any, ...]:
    """Return run, model, optimizer, loader and the lines that were announced."""
    torch.manual_seed(0)
    lines: list[str] = []
    dtype = torch.float32 if "precision" in settings else torch.float64
    run = shoal.init(strategy, announce=lines.append, **settings)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.to(dtype).parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=generator, dtype=dtype)
    labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=batch_size)
    return run, *run.prepare(model, optimizer, loader), lines


def train(strategy: str, form: str, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    run, model, optimizer, loader, _ = prepared(strategy, **settings)

    @run.step
    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    losses = []
    for x, y in [*loader, *loader]:
        optimizer.zero_grad()
        if form == "function":
            loss = step(x, y)
        elif form == "loop":
            loss = run.backward(F.cross_entropy(model(x), y))
        elif form == "counted":
            total = F.cross_entropy(model(x), y, reduction="sum")
            loss = run.backward(shoal.counted(total, len(x)))
        else:
            parts = run.microbatches((x, y))
            loss = sum(run.backward(F.cross_entropy(model(a), b)) for a, b in parts)
        optimizer.step()
        losses.append(float(loss))
    return losses, run.weights()


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    losses, weights = found
    assert losses == pytest.approx(expected[0], rel=tolerance)
    for name, value in expected[1].items():
        assert (weights[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (3, ["ddp", "zero3,unit=Linear"]),
        (2, ["server=1"]),
        pytest.param(2, ["ddp,bucket_mb=0.001", "zero1", "recompute"], marks=pytest.mark.slow),
        pytest.param(4, ["tensor=2,zero1", "zero2,hybrid=2"], marks=pytest.mark.slow),
    ],
)
def test_a_loss_of_the_loop_trains_as_on_one_device(ranks: int, strategies: list[str]) -> None:
    expected = train("single", "function")
    calls = [(strategy, "loop") for strategy in strategies]
    for results in world.run(ranks, in_turn, train, *calls):
        for found in results:
            assert_equal(found, expected)


def test_a_counted_loss_is_divided_by_the_count_of_all_ranks() -> None:
    expected = train("single", "function")
    for found in world.run(2, train, "zero2", "counted"):
        assert_equal(found, expected)


def train_in_parts(strategy: str) -> Any:
    return train(strategy, "parts", accumulate=3)


def test_microbatches_add_up_to_the_batch() -> None:
    expected = train("single", "function")
    assert_equal(train_in_parts("single"), expected)
    for by_ddp, by_zero3 in world.run(3, in_turn, train_in_parts, ("ddp",), ("zero3",)):
        assert_equal(by_ddp, expected)
        assert_equal(by_zero3, expected)


def train_in_bf16(form: str) -> Any:
    return train("ddp", form, precision="bf16")


@pytest.mark.slow
def test_mixed_precision_stands_around_the_models() -> None:
    in_float32 = train("single", "function")
    for expected, found in world.run(2, in_turn, train_in_bf16, ("function",), ("loop",)):
        assert_equal(found, expected, 1e-6)
        assert found[0] != pytest.approx(in_float32[0], rel=1e-6)


def train_on_own_batches(form: str) -> Any:
    torch.manual_seed(0)
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    everyone = torch.arange(20.0, dtype=torch.float64).reshape(5, 4) / 20
    mine = everyone[:2] if run.rank == 0 else everyone[2:]
    if run.world_size == 1:
        mine = everyone
    if form == "function":
        run.forward_backward(lambda x: model(x).square().mean(), mine)
    elif form == "rows":
        model(mine[:1])  # such as a look at one sample
        run.backward(model(mine).square().mean(), rows=len(mine))
    else:
        run.backward(model(mine).square().mean())
    optimizer.step()
    return [], run.weights()


def test_batches_of_ones_own_count_by_their_rows() -> None:
    forms = (("rows",), ("loop",), ("function",))
    expected = in_turn(train_on_own_batches, *forms)
    for results in world.run(2, in_turn, train_on_own_batches, *forms):
        for found, alone in zip(results, expected, strict=True):
            assert_equal(found, alone)


def say_what_is_no_loss() -> dict[str, str]:
    run, model, _, loader, lines = prepared("ddp", batch_size=4)
    said = {}

    def refused(name: str, function: Any) -> None:
        with pytest.raises(UsageError) as error:
            function()
        said[name] = str(error.value)

    for x, y in [*loader][:2]:
        run.backward(F.cross_entropy(model(x), y))
    said["notes"] = "\n".join(line for line in lines if "run.backward" in line)
    refused("vector", lambda: run.backward(model(x).sum(1)))
    refused("number", lambda: run.backward(1.0))
    return said


def accuracy_of_epoch(strategy: str) -> tuple[float, list[str]]:
    """Return the accuracy that a loop adds up as the note says, and the notes on its figures."""
    run, model, optimizer, loader, lines = prepared(strategy)
    hits = seen = 0
    for x, y in loader:
        optimizer.zero_grad()
        scores = model(x)
        run.backward(F.cross_entropy(scores, y))
        optimizer.step()
        hits += int((scores.argmax(1) == y).sum())
        seen += len(x)
    hits, seen = shoal.all_reduce(torch.tensor([hits, seen]), op="sum").tolist()
    return hits / seen, [line for line in lines if "of this rank's samples alone" in line]


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 3), ("tensor=2", 2)])
def test_an_accuracy_that_is_added_up_as_the_note_says_is_that_of_one_device(
    strategy: str, ranks: int
) -> None:
    results = world.run(ranks, accuracy_of_epoch, strategy)
    expected, no_notes = accuracy_of_epoch("single")
    assert [accuracy for accuracy, _ in results] == [expected] * ranks
    assert no_notes == []
    notes = results[0][1]
    assert len(notes) == (1 if strategy == "ddp" else 0)
    assert all('shoal.all_reduce(torch.tensor([hits, seen]), op="sum")' in note for note in notes)


def test_what_is_no_loss_is_refused_and_the_note_comes_once() -> None:
    said = world.run(2, say_what_is_no_loss)[0]
    assert said["notes"].count("note: run.backward assumes") == 1
    assert said["notes"].count("note: len(x)") == 1
    assert "shoal verify SCRIPT -n 2" in said["notes"]
    assert "a tensor of shape (2,)" in said["vector"]
    assert "a float" in said["number"]


def refused_loop(strategy: str, settings: dict[str, Any], form: str) -> str:
    run, model, _, loader, _ = prepared(strategy, **settings)
    x, y = next(iter(loader))

    def loop() -> None:
        if form == "bare":
            F.cross_entropy(model(x), y).backward()
        elif form == "skipped part":
            list(run.microbatches((x, y)))
        elif form == "old graph":
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.backward(loss)
        elif form == "kept graph":
            run.backward(F.cross_entropy(model(x), y), retain_graph=True)
        elif form == "detached":
            run.backward(F.cross_entropy(model(x), y).detach())
        elif form == "layers":
            run.backward(F.cross_entropy(model(x), y))
            run.backward(F.cross_entropy(model[2](model[0](x)), y))
        else:
            run.backward(F.cross_entropy(model(x), y))

    with pytest.raises((UsageError, StrategyRefused)) as error:
        loop()
    return str(error.value)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    # First, for the steps of later runs in this process are no end of one that was refused.
    ("zero3", {}, "bare", r"run\.backward\(loss\) instead of loss\.backward\(\)"),
    ("pipeline=2", {}, "loop", r"the loss must be a function.*run\.forward_backward"),
    ("ddp", {"draws": "global"}, "loop", 'or use draws="rank"'),
    ("ddp", {"accumulate": 2}, "loop", r"for x, y in run\.microbatches\(\(x, y\)\)"),
    ("ddp", {"accumulate": 2}, "skipped part", "micro-batch 0, so its gradient"),
    ("ddp", {}, "old graph", r"hidden = hidden\.detach\(\)"),
    ("ddp", {}, "kept graph", r"run\.backward\(loss_1 \+ loss_2\)"),
    ("ddp", {}, "detached", "is it detached, made of numbers"),
    ("ddp", {"precision": "bf16"}, "layers", "no call of a prepared model was seen"),
]


def test_a_loop_that_would_train_otherwise_is_refused() -> None:
    for texts in world.run(2, in_turn, refused_loop, *(row[:3] for row in REFUSED)):
        for text, (*_, message) in zip(texts, REFUSED, strict=True):
            assert re.search(message, text), text


def test_without_rows_that_are_clear_they_are_asked_for() -> None:
    with pytest.raises(LaunchError, match=r"run\.backward\(loss, rows=len\(x\)\)"):
        world.run(2, unclear_rows)


def unclear_rows() -> None:
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(4, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(model(torch.ones(3, 4)).mean() + model(torch.ones(2, 4)).mean())


class Around(nn.Module):
    """A model whose last layer comes after another prepared model."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = [inside]  # prepared by itself
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inside[0](x))


def dtypes_around() -> list[torch.dtype]:
    """Return the dtypes of the outer model's last layer, and of what it returns to the loop."""
    run = shoal.init("ddp", precision="bf16", announce=lambda _: None)
    inside = nn.Linear(8, 4)
    outside = Around(inside)
    optimizer = torch.optim.SGD([*inside.parameters(), *outside.parameters()], lr=0.1)
    inside, outside, optimizer = run.prepare(inside, outside, optimizer)
    seen: list[torch.dtype] = []
    outside.head.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    output = outside(torch.ones(4, 8))
    run.backward(output.mean())
    return [*seen, output.dtype]


def test_a_model_within_another_does_not_end_its_mixed_precision() -> None:
    assert world.run(2, dtypes_around) == [[torch.bfloat16, torch.float32]] * 2


def train_in_both_forms(strategy: str) -> Any:
    """Take the first loss and every other one from the loop, the rest from a function."""
    run, model, optimizer, loader, _ = prepared(strategy)
    losses = []
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if number % 2 == 0:
            loss = run.backward(loss)
        else:  # what the call of the model has begun never ends
            loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.step()
        losses.append(float(loss))
    return losses, run.weights()


def test_both_forms_may_take_turns() -> None:
    expected = train_in_both_forms("single")
    for by_ddp, by_zero3 in world.run(2, in_turn, train_in_both_forms, ("ddp",), ("zero3",)):
        assert_equal(by_ddp, expected)
        assert_equal(by_zero3, expected)


def loop_after_function(strategy: str) -> str:
    run, model, _, loader, _ = prepared(strategy)
    x, y = next(iter(loader))
    run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    with pytest.raises(UsageError) as error:
        run.backward(F.cross_entropy(model(x), y))
    return str(error.value)


def test_a_loss_of_the_loop_after_those_of_functions_is_refused_on_shards() -> None:
    for text in world.run(2, loop_after_function, "zero3"):
        assert "let run.backward take the first loss of the run" in text


def fails_in_the_model(strategy: str) -> Any:
    run, model, optimizer, loader, _ = prepared(strategy)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if number == 1:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(x[:, :3])
        run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    return [], run.weights()


def test_a_loop_may_go_on_after_an_error_in_a_model() -> None:
    expected = fails_in_the_model("single")
    for found in world.run(2, fails_in_the_model, "zero3"):
        assert_equal(found, expected)


def adapted_domains(sizes: tuple[int, int], at_once: bool, copies: bool = False) -> Any:
    """Train a loss of the batches of two loaders, as domain adaptation does."""
    torch.manual_seed(0)
    run = shoal.init("ddp", announce=lambda _: None)
    body, head = nn.Linear(3, 2).double(), nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    data = torch.arange(24 * 3, dtype=torch.float64).view(24, 3).sin()
    loaders = [DataLoader(data.roll(size, 0), size, drop_last=True) for size in sizes]
    body, head, optimizer, *loaders = run.prepare(body, head, optimizer, *loaders)

    def model(x: Tensor) -> Tensor:
        scores: Tensor = head(body(x))
        return scores

    try:
        for source, target in zip(*loaders, strict=False):
            optimizer.zero_grad()
            if copies:  # as DANN does, into tensors of its own
                source, target = source.clone(), target.clone()
            if at_once:
                loss = model(source).square().mean()
                run.backward(loss + model(target).exp().mean())
            else:
                run.backward(model(source).square().mean())
                run.backward(model(target).exp().mean())
            optimizer.step()
    except UsageError as error:
        return str(error)
    return [], run.weights()


def test_a_loss_of_two_batches_that_ranks_have_other_shares_of_is_refused() -> None:
    expected, others = (adapted_domains(sizes, True) for sizes in ((8, 5), (5, 6)))
    calls = ((8, 5), True), ((8, 5), False), ((8, 5), True, True), ((5, 6), False)
    for text, by_turns, of_copies, fitting in world.run(2, in_turn, adapted_domains, *calls):
        assert re.search("of which this rank has 4 of 8 and [32] of 5 samples", str(text))
        assert re.search("of which this rank has [32] of 5 and 4 of 8 samples", str(of_copies))
        assert_equal(by_turns, expected)
        assert_equal(fitting, others)


def test_a_loss_of_two_batches_that_are_shared_out_alike_trains_as_on_one_device() -> None:
    expected = adapted_domains((8, 6), True)
    for weights in world.run(2, adapted_domains, (8, 6), True):
        assert_equal(weights, expected)


def backward_in_evaluation_mode(strategy: str) -> str:
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = run.share(torch.ones(4, 4))
    try:
        run.backward(model(x).square().mean())
    except UsageError as error:
        return str(error)
    return ""


def test_shards_take_no_loss_of_a_model_in_evaluation_mode() -> None:
    calls = ("zero3",), ("ddp",)
    for of_shards, of_ddp in world.run(2, in_turn, backward_in_evaluation_mode, *calls):
        assert "Call model.train() before the loop" in of_shards
        assert of_ddp == ""
