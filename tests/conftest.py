"""Ranks of test worlds are forked from a server that imports what stands here, once for all
tests.
"""

import signal

import hypothesis
import matplotlib.figure  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401

import shoal.train.loop  # noqa: F401

# A shell's background jobs are started to ignore Ctrl-C, and what ignores it at its start goes on
# to do so by design.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that others use too.
hypothesis.settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared machine")
