"""The first actions of a fork server. Only the server imports this module, as its first one.

- A process can be forked safely while it has one thread. So the numeric libraries that are imported
  next must not start their thread pools.
- A file of the working directory must not be imported in place of a library's module.
- The server dies with the process that started it, at once, also in the middle of an import.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
    os.environ[f"{library}_NUM_THREADS"] = "1"

sys.path[:] = [entry for entry in sys.path if entry]

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

# The imports create no garbage, and collections would take half a second of their two seconds.
# Ranks enable the collector again.
gc.disable()
