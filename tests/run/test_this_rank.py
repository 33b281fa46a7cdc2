"""What a script asks of its own process: its place, lines of rank 0, and who goes first."""

import logging
import math
import time
from pathlib import Path

import pytest
import torch
from minimal_script import parts, quiet
from torch import nn

import shoal
from shoal.errors import LaunchError
from shoal.run.startup_summary import LOGGER
from shoal.testing import world
from tests.harness.in_turn import in_turn


def test_only_rank_zero_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run = quiet()
    run.print("a", 1, sep="-", end="!")
    assert capsys.readouterr().out == "a-1!"
    run.mesh = run.mesh.__class__(rank=1, size=2, device=run.device, place=run.mesh.place)
    run.print("b")
    assert capsys.readouterr().out == ""


def download(directory: Path, local: bool) -> str:
    run = quiet()
    file = directory / "data.txt"
    with run.main_first(local=local):
        if run.rank == 0:
            time.sleep(0.3)
            file.write_text("whole")
        return file.read_text()


def test_the_others_find_what_rank_zero_has_made(tmp_path: Path) -> None:
    calls = []
    for local in (False, True):
        directory = tmp_path / str(local)
        directory.mkdir()
        calls.append((directory, local))
    assert world.run(3, in_turn, download, *calls) == [["whole", "whole"]] * 3


def failing_download() -> None:
    run = quiet()
    with run.main_first():
        assert run.rank == 0, "the others must not enter"
        raise OSError("the server does not answer")


def test_an_error_of_rank_zero_ends_the_others_with_its_reason() -> None:
    with pytest.raises(LaunchError, match="the server does not answer"):
        world.run(2, failing_download)


def clipped(
    strategy: str,
    all_of_them: bool,
    norm_type: float = 2.0,
    by_torch: bool = False,
    others_rest: bool = False,
) -> tuple[float, float]:
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    model, _, loader = run.prepare(*parts(model, batch_size=10))
    for x, y in loader:
        run.forward_backward(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    model[1:].requires_grad_(not others_rest)
    chosen = list(model.parameters()) if all_of_them else model[0].parameters()
    clip = torch.nn.utils.clip_grad_norm_ if by_torch else run.clip_grad_norm_
    norm = clip(chosen, 1e-3, norm_type)
    flat = torch.cat([g.flatten() for g in run.gradients().values() if g is not None])
    return float(norm), float(flat.norm(norm_type))


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("tensor=2", 2.0), ("pipeline=2", 2.0), ("ddp", math.inf)]),
        (2, [("server=2,part_mb=0.0001", math.inf)]),
        pytest.param(2, [("tensor=2", math.inf)], marks=pytest.mark.slow),
        (4, [("pipeline=2,zero1", 2.0)]),
        pytest.param(4, [("pipeline=2", math.inf)], marks=pytest.mark.slow),
    ],
)
def test_all_gradients_are_clipped_as_on_one_device(
    ranks: int, cases: list[tuple[str, float]]
) -> None:
    expected = {norm_type: clipped("single", True, norm_type) for _, norm_type in cases}
    calls = [(strategy, True, norm_type) for strategy, norm_type in cases]
    for results in world.run(ranks, in_turn, clipped, *calls):
        for found, (strategy, norm_type) in zip(results, cases, strict=True):
            assert expected[norm_type][1] == pytest.approx(1e-3, rel=1e-2)
            assert found == pytest.approx(expected[norm_type], rel=1e-10), strategy


def test_shoal_and_torch_find_the_largest_gradient_of_shards_of_which_one_is_empty() -> None:
    expected = clipped("single", True, math.inf)
    # The last of four ranks has no row of the last layer.
    calls = [("zero3", True, math.inf, by_torch) for by_torch in (False, True)]
    for by_shoal, by_torch in world.run(4, in_turn, clipped, *calls):
        assert by_shoal == pytest.approx(expected, rel=1e-10)
        assert by_torch == pytest.approx(expected, rel=1e-10)


def test_gradients_of_some_parameters_are_clipped_by_torch_or_refused() -> None:
    expected = clipped("single", False, 2.0, True)
    calls = [("ddp", False, 2.0, False, others_rest) for others_rest in (False, True)]
    for results in world.run(2, in_turn, clipped, *calls):
        assert results == [pytest.approx(expected, rel=1e-10)] * 2
    with pytest.raises(LaunchError, match=r"run\.clip_gradients"):
        world.run(2, clipped, "pipeline=2", False)


@pytest.fixture
def logger() -> logging.Logger:
    """The logger of Shoal, as a script finds it; put back afterwards."""
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:], LOGGER.propagate = [], True
    LOGGER.setLevel(logging.NOTSET)
    yield logging.getLogger("shoal")
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])


def test_lines_are_printed_until_the_script_says_otherwise(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    shoal.init().prepare(*parts())
    assert "global batch 4 = 1 rank x 4\n" in capsys.readouterr().out
    logger.setLevel(logging.WARNING)
    shoal.init().prepare(*parts())
    assert capsys.readouterr().out == ""


def test_a_handler_of_the_script_gets_lines_and_notes_with_their_levels(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    shoal.init().prepare(*parts())
    assert capsys.readouterr().out == ""
    assert [record.levelname for record in records] == ["INFO"]
