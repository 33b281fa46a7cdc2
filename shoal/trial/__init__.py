"""Trials that tell before training whether many ranks can compute what one device computes.

LossTrial        the trials of a run: which steps, and what becomes of their verdicts
try_loss         is compute_loss a mean over samples? By gradients, on parts of a batch
try_recorded     the same on outputs that the models have given already
end_trial        called first by functions that communicate, such as run.gather
optimizer_is_elementwise      does an optimizer step halves of tensors as it steps the whole?
optimizer_steps_parameters_alone   does it step a parameter as without the other parameters?
optimizer_steps_shards        does it step sharded tensors so? Asked where halves differ
"""

from shoal.trial.elementwise import (
    OptimizerAnswer,
    optimizer_is_elementwise,
    optimizer_steps_parameters_alone,
)
from shoal.trial.judge_loss import try_loss
from shoal.trial.loss_trial import LossTrial
from shoal.trial.loss_verdict import LossKind, LossVerdict, end_trial
from shoal.trial.recorded_outputs import OutputRecorder, try_recorded
from shoal.trial.sharded_steps import optimizer_steps_shards

__all__ = [
    "LossKind",
    "LossTrial",
    "LossVerdict",
    "OptimizerAnswer",
    "OutputRecorder",
    "end_trial",
    "optimizer_is_elementwise",
    "optimizer_steps_parameters_alone",
    "optimizer_steps_shards",
    "try_loss",
    "try_recorded",
]
