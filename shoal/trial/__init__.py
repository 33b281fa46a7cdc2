"""Trials that tell before training whether many ranks can compute what one device computes.

LossTrial        the trials of a run: which steps, and what becomes of their verdicts
try_loss         is compute_loss a mean over samples? By gradients, on parts of a batch
try_recorded     the same on outputs that the models have given already
end_trial        called first by functions that communicate, such as run.gather
"""

from shoal.trial.judge_loss import try_loss
from shoal.trial.loss_trial import LossTrial
from shoal.trial.loss_verdict import LossKind, LossVerdict, end_trial
from shoal.trial.recorded_outputs import OutputRecorder, try_recorded

__all__ = [
    "LossKind",
    "LossTrial",
    "LossVerdict",
    "OutputRecorder",
    "end_trial",
    "try_loss",
    "try_recorded",
]
