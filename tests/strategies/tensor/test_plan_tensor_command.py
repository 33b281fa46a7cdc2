"""`shoal plan-tensor` plans for the degree that it was given, by its flag or by the strategy."""

from __future__ import annotations

import pytest

from shoal import cli


@pytest.mark.parametrize(
    ("words", "degree"),
    [((), 2), (("--strategy", "tensor=4"), 4), (("--strategy", "tensor=4", "-t", "2"), 2)],
)
def test_the_degree_is_that_of_the_flag_or_else_of_the_strategy(
    words: tuple[str, ...], degree: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan-tensor", "stdlib_gpt", *words])
    assert stop.value.code == 0
    assert f"tensor={degree}: column" in capsys.readouterr().out
