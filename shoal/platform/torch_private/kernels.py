"""Functions of torch whose names begin with an underscore, and that torch.optim is built of."""

from __future__ import annotations

import torch

# Why: one call for a list of tensors, where a loop takes a call each. Without: clipping, scaling
# and averaging are slower for models of many tensors; the numbers are those of the loop. Aliases:
# they are hot. Checked: 2.11, 2.13, 2.15.
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

# Why: one call that makes many small tensors one, where `flatten` takes a call each; the check of
# each step does it. Without: 25 us more for 64 tensors. Checked: 2.11, 2.13, 2.15.
flatten_dense_tensors = torch._C._nn.flatten_dense_tensors

# Why: a check of numbers on a GPU that does not wait for it. Without: every embedding in slices
# would wait. Checked: 2.11, 2.13, 2.15.
assert_async = torch._assert_async

# Why: a row of which all is masked gives zeros, as in scaled_dot_product_attention. Without: NaN
# where one device has none. Checked: 2.11, 2.13, 2.15.
safe_softmax = torch._safe_softmax
