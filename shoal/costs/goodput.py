"""Failures: how often to save, and which share of the time trains.

M seconds between failures of the whole job, C seconds of a save, R seconds of a restart.

      Young   tau = sqrt(2 C M)
      Daly    tau = sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/18M) - C      for C < 2M, else M

      goodput = tau e^(-R/M) / (M (e^((tau+C)/M) - 1))

tau is the time of training between two saves. Failures come at random at a constant rate; after one
the job goes on from the last save, and what was done since is lost.

Sources: Young, CACM 1974; Daly, Future Generation Computer Systems 2006, equations 20 and 37.
"""

from __future__ import annotations

from math import exp, expm1, sqrt


def daly_interval_s(mtbf_s: float, save_s: float) -> float:
    """Return the time between two saves that loses least."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    half = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(half) / 3 + half / 9) - save_s


def daly_steps(mtbf_s: float, save_s: float, step_s: float) -> int:
    """Return the steps between two saves that lose least, at least 1."""
    return max(1, round(daly_interval_s(mtbf_s, save_s) / step_s))


def goodput(mtbf_s: float, save_s: float, restart_s: float, interval_s: float) -> float:
    """Return the share of the time in which steps are taken that are not lost again."""
    if mtbf_s == float("inf"):
        return interval_s / (interval_s + save_s)
    rounds = mtbf_s * expm1((interval_s + save_s) / mtbf_s)
    return interval_s * exp(-restart_s / mtbf_s) / rounds
