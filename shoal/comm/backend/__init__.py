"""A backend of torch.distributed for CPU tensors: ranks of one host meet in shared memory, and Gloo does the rest.

import shoal
torch.distributed.init_process_group("cpu:shoal")

  torch.distributed ── group.py ──┬── order.py ── collectives.py ── exchange.py      shared memory
                     (what is     │   (calls in   (who shows and    (phases, slots;
                      asked for)  │    order)      takes what)       each writes its own)
                                  └── Gloo: other devices, types and hosts
"""
