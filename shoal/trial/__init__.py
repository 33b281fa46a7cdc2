"""Trials that tell before training whether many ranks can compute what one device computes.

try_loss                is compute_loss a mean over samples? By gradients, on parts of a batch
"""

from shoal.trial.judge_loss import try_loss
from shoal.trial.verdict import LossKind, Verdict

__all__ = ["LossKind", "Verdict", "try_loss"]
