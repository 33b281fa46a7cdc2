"""Lets ranks of tests end at once; the server that they are forked from imports this last.

torch registers its operators in some 170 libraries, each with a finalizer that takes its operators
out of the dispatcher again. At the end of a process that is of no use, and takes a rank 30 ms: as
much as all else of a rank that does nothing.
"""

import weakref

from torch.library import Library

for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
    alive = finalizer.peek()
    if alive and isinstance(alive[0], Library):
        finalizer.atexit = False
