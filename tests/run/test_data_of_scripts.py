"""What scripts do with their data sets and loaders that is easily done to a rank's rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

MODULE_GENERATOR = np.random.default_rng(0)


def prepared(notes: list[str], strategy: str = "ddp") -> tuple[shoal.Run, nn.Module, Any]:
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", announce=notes.append)
    model = nn.Linear(8, 2).double()
    return run, *run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def evaluated(samples: int) -> tuple[list[str], float, float]:
    """Return notes, the rows that a loop of its own counts, and those that are no stand-ins."""
    notes: list[str] = []
    run, model, _ = prepared(notes)
    held_out = run.prepare(DataLoader(TensorDataset(torch.ones(samples, 8).double()), batch_size=4))
    counts = torch.zeros(2)
    with torch.no_grad():
        for (x,) in held_out:
            counts += torch.tensor([len(model(x)), len(model(x)[: held_out.share.rows])])
    rows, right = shoal.allreduce(counts, op="sum").tolist()
    return [note for note in notes if "stand-in" in note], rows, right


def test_an_evaluation_over_a_prepared_loader_is_told_of_its_rows_and_of_stand_ins() -> None:
    results, _ = world.run(2, in_turn, evaluated, (12,), (13,))
    counts = (12, 12), (13, 14)
    for (notes, rows, right), (samples, counted) in zip(results, counts, strict=True):
        assert (rows, right) == (counted, samples)
        (note,) = notes
        assert "is of these alone" in note
        assert "run.evaluate(compute_sums, loader)" in note
        assert "loader.share.rows" in note
    assert evaluated(13) == ([], 13, 13)


def trained_on_short_batches() -> list[str]:
    notes: list[str] = []
    run, model, optimizer = prepared(notes)
    loader = run.prepare(DataLoader(TensorDataset(torch.ones(13, 8).double()), batch_size=4))
    for (x,) in loader:
        run.forward_backward(lambda x: model(x).mean(), x)
        optimizer.step()
    return [note for note in notes if "stand-in" in note]


def test_a_loop_that_trains_gets_no_note_about_stand_ins() -> None:
    assert world.run(2, trained_on_short_batches)[0] == []


def split(seeded: bool) -> int:
    run = prepared([])[0]
    generator = torch.Generator().manual_seed(1) if seeded else None
    part = random_split(range(100), [80, 20], generator=generator)[0]  # type: ignore[arg-type]
    return len(run.prepare(DataLoader(part, batch_size=10)))


def refused_split() -> str:
    with pytest.raises(UsageError) as error:
        split(seeded=False)
    return str(error.value)


def test_parts_that_ranks_draw_by_other_numbers_are_refused_with_a_cure() -> None:
    for error in world.run(2, refused_split):
        assert "Subset or its sampler is not the same on all ranks" in error
        assert "generator=torch.Generator().manual_seed(fold)" in error
    assert world.run(2, split, True) == [8, 8]


class Noisy(Dataset):
    """Each sample is its index and a number of a generator that the data set keeps."""

    def __init__(self, kind: str) -> None:
        self.transforms: list[Any] = [Transform(kind)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.tensor(self.transforms[0]())


class Transform:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.generator: Any = {
            "NumPy": np.random.default_rng(0),
            "old NumPy": np.random.RandomState(0),
            "torch": torch.Generator(),
        }.get(kind)

    def __call__(self) -> float:
        if self.kind == "module":
            return MODULE_GENERATOR.random()
        if self.kind == "torch":
            return torch.rand((), generator=self.generator).item()
        draw = self.generator.rand if self.kind == "old NumPy" else self.generator.random
        return float(draw())


def drawn(kind: str, workers: int) -> dict[tuple[int, int], float]:
    """Return the number of each epoch and sample on this rank."""
    run = shoal.init("ddp", announce=lambda _: None)
    loader = run.prepare(DataLoader(Noisy(kind), batch_size=6, num_workers=workers))
    return {
        (epoch, i): number
        for epoch in range(2)
        for indices, numbers in loader
        for i, number in zip(indices.tolist(), numbers.tolist(), strict=True)
    }


def test_generators_of_a_data_set_give_each_sample_its_numbers_on_any_rank() -> None:
    calls = ("NumPy", 2), ("old NumPy", 0), ("torch", 0), ("module", 2)
    of_two_ranks = zip(*world.run(2, in_turn, drawn, *calls), strict=True)
    (alone,) = world.run(1, in_turn, drawn, *((kind, 0) for kind, _ in calls))
    for (first, second), expected in zip(of_two_ranks, alone, strict=True):
        found = {**first, **second}
        assert len(found) == len(set(found.values())) == 24
        assert found == expected


def forgets_the_loader() -> list[str]:
    notes: list[str] = []
    run, model, optimizer = prepared(notes)
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for x in DataLoader(data, batch_size=4, shuffle=True):  # type: ignore[arg-type]
        run.forward_backward(lambda x: model(x).mean(), x)
        optimizer.step()
    return [note for note in notes if "the ranks have different rows" in note]


def test_batches_that_ranks_make_by_themselves_are_told_once() -> None:
    (note,) = world.run(2, forgets_the_loader)[0]
    assert "run.prepare(loader)" in note
    assert "run.share(batch)" in note


def leaves_the_second_loader_out(has_function: bool) -> list[list[str]]:
    """Return the notes on a second phase: prepared, fetched ahead, not prepared."""
    found: list[list[str]] = []
    for phase in ("prepared", "ahead", "raw"):
        notes: list[str] = []
        run, model, optimizer = prepared(notes)
        x = torch.arange(128.0).reshape(16, 8).double() / 128
        first, raw = (DataLoader(TensorDataset(x), batch_size=4, shuffle=True) for _ in range(2))
        loader, second = run.prepare(first), raw if phase == "raw" else run.prepare(raw)
        ahead = [(x + 1,) for (x,) in second] if phase == "ahead" else second
        for batches in (loader, ahead):
            for (rows,) in batches:
                optimizer.zero_grad()
                if has_function:
                    run.forward_backward(lambda x, net=model: net(x).mean(), rows)
                else:
                    run.backward(model(rows + 1).mean())
                optimizer.step()
        found.append([note for note in notes if "no prepared loader has yielded" in note])
    return found


def test_a_second_loader_that_is_not_prepared_is_told() -> None:
    results = world.run(2, in_turn, leaves_the_second_loader_out, (False,), (True,))[0]
    for inside, fetched, (note,) in results:
        assert inside == fetched == []
        assert "loader = run.prepare(loader)" in note


def collate(samples: list[tuple[Tensor, Tensor | None]]) -> dict[str, Any]:
    images = [image for _, image in samples if image is not None]
    x = torch.stack([x for x, _ in samples])
    return {"x": x, "images": torch.stack(images) if images else None}


def trained_without_images(strategy: str) -> Tensor:
    run, model, optimizer = prepared([], strategy)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 8, generator=generator, dtype=torch.float64)
    data: Any = [(row, torch.ones(4) if i in (1, 2) else None) for i, row in enumerate(rows)]
    for batch in run.prepare(DataLoader(data, batch_size=8, collate_fn=collate)):
        run.forward_backward(lambda batch: model(batch["x"]).pow(2).mean(), batch)
        optimizer.step()
    return run.weights()["weight"]


def test_a_collate_function_may_return_none_for_a_part_of_a_batch() -> None:
    expected = trained_without_images("single")
    for weight in world.run(2, trained_without_images, "ddp"):
        assert torch.allclose(weight, expected, rtol=1e-10, atol=1e-14)


class Relabelled(Dataset):
    """Samples with their indices, whose labels the script writes anew."""

    def __init__(self) -> None:
        self.labels = torch.zeros(7).double()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, torch.full((8,), index + 1.0).double(), self.labels[index]


def relabels(gathers: bool) -> tuple[list[str], Tensor]:
    """Return notes, and the weights after epochs in which each step writes labels of its batch."""
    notes: list[str] = []
    run, model, optimizer = prepared(notes)
    data = Relabelled()
    loader = run.prepare(DataLoader(data, batch_size=4, shuffle=True))
    for _ in range(3):
        for index, x, y in loader:
            optimizer.zero_grad()
            run.forward_backward(lambda x, y: (model(x).sum(1) - y).square().mean() / 999, x, y)
            optimizer.step()
            labels = model(x).sum(1).detach()
            if gathers:
                index, labels = run.gather(index), run.gather(labels)
            data.labels[index] = labels
    return [note for note in notes if "data set is no longer" in note], model.weight.detach()


def test_labels_that_each_rank_writes_for_its_own_samples_are_told() -> None:
    right = relabels(False)[1]
    results, _ = world.run(2, in_turn, relabels, (False,), (True,))
    (notes, weight), (cured_notes, cured) = results
    (note,) = notes
    assert "data.targets[run.gather(index)] = run.gather(labels)" in note
    assert not torch.allclose(weight, right, rtol=1e-10, atol=0)
    assert cured_notes == []
    torch.testing.assert_close(cured, right, rtol=1e-10, atol=0)


def prepared_again(strategy: str) -> dict[str, Tensor]:
    """Train an epoch, then a second phase whose loader is given to `prepare` again."""
    run, model, optimizer = prepared([], strategy)
    x = torch.randn(13, 8, generator=torch.Generator().manual_seed(1)).double()
    loader = run.prepare(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))
    for _ in range(2):
        for (rows,) in loader:
            optimizer.zero_grad()
            run.backward(model(rows).square().mean())
            optimizer.step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, again = run.prepare(model, optimizer, loader)
        assert again is loader
    return run.weights()


def test_a_loader_that_is_prepared_again_stays_as_it_is() -> None:
    expected = prepared_again("single")
    for found in world.run(2, prepared_again, "ddp"):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
