"""A backend of torch.distributed for CPU tensors: ranks of one host meet in shared memory, and Gloo
does the rest.

import shoal
torch.distributed.init_process_group("cpu:shoal")

  torch.distributed ── group.py ────────── calling.py ──┬── order.py ── collectives.py ── board.py    shared memory
                       reductions.py      (who does     │   (calls in   (who shows and    (phases, slots;
                       copies.py           the call)    │    order)      takes what)       each writes its own)
                       messages.py              │       │             └ express.py ── express.c              (compiled)
                                                │       └── Gloo: other devices, types and hosts
                                                └── Gloo: messages from rank to rank
"""
