"""Tables and streams of Hugging Face's `datasets`: each sample once over the ranks, after a restart
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import shoal
from shoal.errors import DataError, UsageError
from shoal.platform.optional_packages import is_installed
from shoal.testing import world

pytestmark = pytest.mark.skipif(not is_installed("datasets"), reason="pip install 'shoal[hf]'")
SAMPLES, BATCH = 46, 8  # the last batch has six samples
Rows = list[list[int]]


def samples() -> Iterator[dict[str, int]]:
    for index in range(SAMPLES):
        yield {"x": index}


def data_set(kind: str) -> Any:
    import datasets
    from datasets.distributed import split_dataset_by_node

    if kind == "generator":
        return datasets.IterableDataset.from_generator(samples)
    table = datasets.Dataset.from_dict({"x": list(range(SAMPLES))})
    if kind in ("table", "shuffled table"):
        return table.map(lambda rows: {"x": [x + 1 for x in rows["x"]]}, batched=True)
    data = table.to_iterable_dataset(num_shards=2)
    if kind == "shuffled":
        return data.shuffle(seed=3, buffer_size=16)
    if kind == "mapped":
        return data.map(lambda row: {"x": row["x"] + 100}).filter(lambda row: row["x"] % 5)
    return split_dataset_by_node(data, rank=0, world_size=2) if kind == "split" else data


def loader_of(kind: str, workers: int = 0) -> DataLoader:
    data = data_set(kind).with_format("torch")
    shuffle = True if kind == "shuffled table" else None
    return DataLoader(data, batch_size=BATCH, num_workers=workers, shuffle=shuffle)


def read(kind: str, workers: int, saved: Path, stop: int | None = None) -> Rows:
    """Train over two epochs, or go on with a run that has stopped.

    Args:
        saved: directory of checkpoints.
        stop: steps after which to save and stop; None for the end.

    Returns: the rows of this rank in each batch; a stand-in for none is left out.
    """
    run = shoal.init(announce=str)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    model, optimizer, loader = run.prepare(model, optimizer, loader_of(kind, workers))
    checkpoint = run.checkpoint(saved)
    step, found = checkpoint.resume(), []
    for _ in range(loader.epoch, 2):
        for batch in loader:
            x = batch["x"]
            run.backward(model(x[:, None].float()).square().mean())
            optimizer.step()
            step += 1
            found.append(x.tolist()[: loader.share.rows])
            if step == stop:
                checkpoint.save(step)
                return found
    return found


def joined(of_ranks: list[Rows]) -> Rows:
    return [list(chain(*rows)) for rows in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *(("table", 0), ("shuffled table", 2)),
        *(("plain", 0), ("plain", 2), ("generator", 0), ("mapped", 0), ("shuffled", 0)),
    ],
)
def test_ranks_share_the_batches_of_one_process_and_go_on_in_the_middle(
    kind: str, workers: int, tmp_path: Path
) -> None:
    (whole,) = world.run(1, read, kind, workers, tmp_path / "one")
    first = joined(world.run(3, read, kind, workers, tmp_path / "two", 4))
    rest = joined(world.run(2, read, kind, workers, tmp_path / "two"))
    assert first + rest == whole
    half = len(whole) // 2
    expected = sorted(x for batch in loader_of(kind) for x in batch["x"].tolist())
    for epoch in (whole[:half], whole[half:]):
        assert sorted(chain(*epoch)) == expected
    if not kind.startswith("shuffled"):
        plain = [batch["x"].tolist() for batch in loader_of(kind, workers)]
        assert whole[:half] == plain


def test_a_stream_that_is_divided_among_ranks_already_is_refused() -> None:
    with pytest.raises((UsageError, DataError), match="split_dataset_by_node"):
        shoal.init(announce=str).prepare(loader_of("split"))
