"""The trial that tells before training whether many ranks can compute what one device computes.

try_loss         is compute_loss a mean over samples? By gradients, on parts of a batch
judged_in_child  the same in a process that leaves no trace
end_trial        called first by functions that communicate, such as run.gather
"""

from shoal.trial.child_process import judged_in_child
from shoal.trial.judge_loss import try_loss
from shoal.trial.loss_verdict import LossKind, LossVerdict, end_trial

__all__ = ["LossKind", "LossVerdict", "end_trial", "judged_in_child", "try_loss"]
