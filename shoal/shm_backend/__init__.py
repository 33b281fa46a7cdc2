"""A backend of torch.distributed for CPU tensors: shared memory inside a host, Gloo for the rest.

import shoal
torch.distributed.init_process_group("cpu:shoal")

  torch.distributed
        │
    group.py ── reduction_ops.py, movement_ops.py     the collectives as torch calls them
        │            └── dispatch.py                  shared memory or Gloo?
        │                    │
        │                    ├── call_queue.py        calls in order
        │                    │     ├── call_handles.py    their handles
        │                    │     ├── collectives.py     who writes and who reads in which phase
        │                    │     ├── native.py          the same in C, for all-reduces
        │                    │     ├── inter_host.py      all-reduces over several hosts
        │                    │     ├── waiter.py          spins, sleeps, checks the other ranks
        │                    │     └── phase_board.py     phases and slots in shared memory
        │                    │
        │                    └── Gloo                 other devices, types and hosts
        │                          └── gloo_progress.py    its calls, for the launcher
        │
        └── messages.py ─── Gloo                      messages from rank to rank
"""
