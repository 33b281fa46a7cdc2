"""Trials that tell before training whether many ranks can compute what one device computes.

LossTrial        the trials of a run: which steps, and what becomes of their verdicts
try_loss         is compute_loss a mean over samples? By gradients, on parts of a batch
end_trial        called first by functions that communicate, such as run.gather
"""

from shoal.trial.judge_loss import try_loss
from shoal.trial.loss_trial import LossTrial
from shoal.trial.loss_verdict import LossKind, LossVerdict, end_trial

__all__ = [
    "LossKind",
    "LossTrial",
    "LossVerdict",
    "end_trial",
    "try_loss",
]
