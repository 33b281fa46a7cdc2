"""Ranks of test worlds are forked from a server that imports what stands here, once for all tests."""

import matplotlib.figure  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401

import shoal.train.loop  # noqa: F401
