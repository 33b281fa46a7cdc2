"""54 losses of known training scripts, in the fewest words, and the verdict that each must get."""

import coupled_losses
import mean_losses
from loss_cases import CASES, Case, Language, N, ids, labels, mlp, padded, x

FILES = (mean_losses, coupled_losses)
"""Each adds its cases to CASES when it is imported."""

__all__ = ["CASES", "FILES", "Case", "Language", "N", "ids", "labels", "mlp", "padded", "x"]
