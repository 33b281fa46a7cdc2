"""Guards: what bypasses `run` works, or ends in an error that names the cure.

      a loop does                              file
      loss.backward()                          backward_hooks.py
      clip_grad_norm_, p.grad                  absent_values.py, grad_clipping.py
      p.grad.norm().item()                     shard_functions.py
      mean.lerp_(p, 0.1)                       shard_functions.py
      p.clamp_(), p.data, load_state_dict      weight_writes.py, full_state.py
      model.state_dict()                       full_state.py
      optimizer.state[p], deepcopy(optimizer)  optimizer_state.py
      GradScaler, functional_call, torch.save  refused_calls.py
      torch.randn_like(p), p.normal_()         shard_functions.py
      weights of another pipeline stage        absent_values.py
      rates of its own on each rank            rank_agreement.py

`Guards` (`guards.py`) installs all of them, and removes them. A copy or a pickle of a model has
none.
"""

from shoal.run.guards.guards import Guards

__all__ = ["Guards"]
