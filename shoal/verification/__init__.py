"""The proof: a strategy trains a model as one process does, to the last digits of float64.

      one process    batch 0 ── gradients ── step ── batch 1 ── gradients ── step ── ...    a plain PyTorch loop
                                    ║ every parameter's                   ║
      n ranks        batch 0 ── gradients ── step ── batch 1 ── gradients ── step ── ...    Shoal, with the strategy

The optimizer is SGD with momentum: Adam divides a wrong scale away. One file each: `trajectory` has
the two loops, `differences` compares them, `batches` makes a loader of a function, `verdict` is
what a user calls and reads."""

from shoal.verification.trajectory import Experiment
from shoal.verification.verdict import Verdict, verify, verify_job

__all__ = ["Experiment", "Verdict", "verify", "verify_job"]
