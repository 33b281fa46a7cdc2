"""The conformance check of a strategy: gradients and weights must equal those of one process, to
1e-10 in float64.

A strategy's author calls `check_strategy` on experiments; those of Shoal's own strategies are in
tests/matrix/cases.py.
"""

from __future__ import annotations

from shoal.verification import Experiment, verify_job


def check_strategy(strategy: str, ranks: int, experiment: Experiment, accumulate: int = 1) -> None:
    """Raise AssertionError with the worst tensors unless every one of `ranks` ranks trains like one
    process.
    """
    verdict = verify_job(experiment, strategy, ranks, accumulate=accumulate, timeout_s=60.0)
    assert verdict.verdict == "exact", (
        f"{strategy} on {ranks} ranks differs from one process:\n{verdict}"
    )
