"""What a fork server does before all else. Only the server imports this, as the first of its
preloaded modules.

A process can be forked safely while it has one thread, so the numeric libraries that it imports
next must not start their pools. No file of the working directory may be taken for a library's
module of that name. And the server dies with the process that started it, at once, even in the
middle of an import."""

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

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

# Half a second of two that the imports take would go into looking for garbage where there is none.
# Ranks turn it on.
gc.disable()
