"""A backend of torch.distributed for CPU tensors: shared memory inside a host, Gloo for the rest.

import shoal
torch.distributed.init_process_group("cpu:shoal")

  torch.distributed ── torch_calls.py      the forms of a call; profilers
        │
    group.py                               the collectives: shared memory or Gloo?
        │
        ├── call_queue.py                  calls in order, and their handles
        │     ├── collectives.py           who writes and who reads in which phase
        │     ├── native.py                the same in C, for all-reduces
        │     ├── waiter.py                spins, sleeps, checks the other ranks
        │     └── phase_board.py           phases and slots in shared memory
        │
        └── gloo_calls.py                  Gloo: messages, other collectives, types and hosts
"""
