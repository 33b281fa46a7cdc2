"""Saves and failures, with published numbers."""

from __future__ import annotations

from math import inf, sqrt

import pytest

from shoal.costs.goodput import daly_interval_s, daly_steps, goodput

# Llama 3 (arXiv:2407.21783, section 3.3.4): 419 unexpected stops in 54 days on 16,384 GPUs.
LLAMA_MTBF_S = 54 * 86400 / 419


def test_llama_3_stopped_every_three_hours() -> None:
    assert pytest.approx(3.09, abs=0.01) == LLAMA_MTBF_S / 3600
    per_gpu = LLAMA_MTBF_S * 16384
    assert per_gpu / 3600 == pytest.approx(50_700, rel=0.01)


@pytest.mark.parametrize(
    ("save_s", "minutes", "daly", "lost"), [(60.0, 19.0, 18.60, 0.104), (5.0, 5.6, 5.51, 0.030)]
)
def test_saves_of_llama_3(save_s: float, minutes: float, daly: float, lost: float) -> None:
    assert sqrt(2 * save_s * LLAMA_MTBF_S) / 60 == pytest.approx(minutes, abs=0.35)  # Young
    best = daly_interval_s(LLAMA_MTBF_S, save_s)
    assert best / 60 == pytest.approx(daly, abs=0.01)
    # To first order sqrt(2 C / M) is lost; exactly a little less.
    assert sqrt(2 * save_s / LLAMA_MTBF_S) == pytest.approx(lost, abs=5e-4)
    assert 1 - goodput(LLAMA_MTBF_S, save_s, 0.0, best) == pytest.approx(lost, rel=0.04)


def test_a_restart_of_five_minutes_costs_llama_3_nearly_three_percent() -> None:
    best = daly_interval_s(LLAMA_MTBF_S, 5.0)
    without, with_restart = (goodput(LLAMA_MTBF_S, 5.0, r, best) for r in (0.0, 300.0))
    assert without - with_restart == pytest.approx(0.026, abs=0.002)


@pytest.mark.parametrize("save_s", [1.0, 60.0, 600.0])
def test_dalys_interval_loses_less_than_its_neighbours(save_s: float) -> None:
    mtbf_s = 3600.0
    best = daly_interval_s(mtbf_s, save_s)
    for factor in (0.8, 1.25):
        assert goodput(mtbf_s, save_s, 0.0, best) > goodput(mtbf_s, save_s, 0.0, factor * best)


def test_without_failures_only_saves_take_time() -> None:
    assert goodput(inf, 1.0, 100.0, 9.0) == 0.9


def test_a_save_longer_than_two_failures_apart_has_no_better_interval_than_one_failure() -> None:
    assert daly_interval_s(10.0, 25.0) == 10.0


def test_the_interval_in_steps_is_one_at_least() -> None:
    assert daly_steps(LLAMA_MTBF_S, 60.0, 5.0) == round(daly_interval_s(LLAMA_MTBF_S, 60.0) / 5)
    assert daly_steps(10.0, 0.0, 1.0) == 1
    assert daly_steps(60.0, 1.0, 3600.0) == 1
