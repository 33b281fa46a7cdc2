"""Private names that stand in torch's files of checkpoints."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

# Why: torch's reader of checkpoints looks for objects of this class in `.metadata`. Without:
# torch's own tools cannot read a checkpoint of Shoal's. Checked: 2.11, 2.13, 2.15.
StorageInfo = _StorageInfo

# Why: the description of a tensor in a file of torch.save is a call of this function; torch.save
# itself does not tell where in the file it puts the numbers. Without: torch.load cannot read the
# tensors of a checkpoint of Shoal's. Checked: 2.11, 2.13, 2.15.
REBUILD_TENSOR = torch._utils._rebuild_tensor_v3
