"""The table that `auto` goes by: what is measured, what is nearest, what is no table."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm.algorithms.measure import main
from shoal.comm.algorithms.table import MEASURED, NAMES, Row, Table, described, fastest, parse
from shoal.comm.algorithms.timing import measured, merged
from shoal.comm.axis import Axis
from shoal.errors import ConfigError, UsageError
from shoal.testing import world

TABLE = Table(
    "somewhere",
    (
        Row(1, 4, 1024, {"backend": 1.0, "ring": 2.0}),
        Row(4, 4, 1024, {"tree": 1.0, "ring": 2.0}),
        Row(4, 4, 2**20, {"tree": 2.0, "ring": 1.0}),
        Row(4, 8, 1024, {"hierarchical": 1.0, "ring": 2.0}),
    ),
)


def test_the_fastest_algorithm_of_the_nearest_size_and_world_is_taken() -> None:
    assert fastest(TABLE.for_ranks(2, 1), 10**9) == "backend"
    rows = TABLE.for_ranks(4, 4)
    assert [fastest(rows, size_bytes) for size_bytes in (0, 4, 20_000, 50_000, 10**9)] == [*["tree"] * 3, *["ring"] * 2]
    assert fastest(TABLE.for_ranks(64, 64), 4) == "hierarchical"
    assert described(rows) == "tree from 1 KiB, ring from 1024 KiB"


def test_the_table_that_comes_with_shoal_can_be_read_and_names_its_machine() -> None:
    found = parse(MEASURED.read_text(), "measured.json")
    assert found.machine
    assert {row.hosts for row in found.rows} >= {1, 2, 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no such file"),
        ("{", "not a table"),
        ('{"machine": "m", "rows": [{"hosts": 1}]}', "not a table"),
        ('{"machine": "m", "rows": []}', "each row needs"),
        ('{"machine": "m", "rows": [{"hosts": 1, "ranks": 2, "size_bytes": 1, "seconds": {"rnig": 1}}]}', "'ring'"),
        ('{"machine": "m", "rows": [{"hosts": 1, "ranks": 2, "size_bytes": 1, "seconds": {"ring": 0}}]}', "above 0"),
    ],
)
def test_what_is_no_table_is_refused_with_the_cure(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, "mine.json")


def test_measuring_a_world_again_replaces_its_rows_and_keeps_the_others() -> None:
    def row(ranks: int, seconds: float) -> dict[str, object]:
        return {"hosts": 1, "ranks": ranks, "size_bytes": 1024, "seconds": {"ring": seconds}}

    found = json.loads(merged([row(2, 1.0), row(4, 1.0)], "mine", [row(2, 3.0)]))
    assert found == {"machine": "mine", "rows": [row(2, 3.0), row(4, 1.0)]}


def test_measuring_writes_a_table_that_auto_can_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    world.run(2, _measure, file)
    (row,) = parse(file.read_text(), "mine.json").for_ranks(2, 1)
    assert set(row.seconds) == set(NAMES)


def _measure(file: Path) -> None:
    rows = measured(Axis(dist.get_rank(), 2, torch.device("cpu")), sizes_bytes=[256], rounds=1)
    if dist.get_rank() == 0:
        file.write_text(merged([], "mine", rows))


@pytest.mark.parametrize(("world_size", "words", "message"), [(1, [], "Give -n 2"), (2, ["-n", "4"], "Leave -n out")])
def test_ranks_to_measure_are_there_or_to_be_started_not_both(
    world_size: int, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if world_size > 1:
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}).items():
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        main([str(tmp_path / "table.json"), *words])
