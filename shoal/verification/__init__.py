"""The proof: a strategy trains a model as one process does, to the last digits of float64.

    one process   batch 0 ── gradients ── step ── batch 1 ── gradients ── step ── ...   by hand
                                 ║ each parameter's                ║
    n ranks       batch 0 ── gradients ── step ── batch 1 ── gradients ── step ── ...   by Shoal

The optimizer is SGD with momentum, because Adam divides a wrong scale of the gradients away.

- `trajectory` has the two loops;
- `differences` compares tensors;
- `verdict` has the functions that a user calls, and their result.
"""

from shoal.verification.trajectory import Experiment
from shoal.verification.verdict import Verdict, verify, verify_job

__all__ = ["Experiment", "Verdict", "verify", "verify_job"]
