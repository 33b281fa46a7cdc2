"""Odd calls of the Python API: one clear error of Shoal's on every rank, and the run goes on."""

from __future__ import annotations

from odd_calls import Script, objections

from shoal.testing import world


def calls_oddly() -> tuple[int, list[str], bool]:
    script = Script()
    count, lines = objections(script)
    script.step(script.compute_loss)
    script.optimizer.step()
    return count, lines, script.run.finite


def test_odd_calls_of_a_run_are_refused_on_every_rank_and_training_goes_on() -> None:
    for count, lines, is_finite in world.run(2, calls_oddly):
        assert count >= 80
        assert "\n".join(lines) == ""
        assert is_finite
