"""The first half of a backward pass. This module takes long to import, so import it where it is
called.

Why: a zero-bubble schedule sends the gradient of an input before it computes those of the weights
(Qi et al., arXiv:2401.10241), and torch.distributed.pipelining cuts the graph by this function.
Without: no schedule with halves. Checked: 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch.distributed.pipelining._backward import stage_backward_input

__all__ = ["stage_backward_input"]
