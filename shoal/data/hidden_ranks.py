"""A process without ranks, as data sets see it while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.data.seeds import preserve_rng_state, seed_all
from shoal.platform.torch_private.data_workers import without_default_group

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)


@contextmanager
def hidden_ranks() -> Iterator[None]:
    """Hide the ranks in the block: no default process group, no launcher's variables.

    WebDataset and data sets of users take their share by these. Shoal shares out global batches
    itself, and each rank would lack what no other has.
    """
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        with without_default_group():
            yield
    finally:
        os.environ.update(hidden)


@contextmanager
def one_process(seed: int) -> Iterator[None]:
    """Hide the ranks in the block, which draws under `seed`."""
    with preserve_rng_state(), hidden_ranks():
        seed_all(seed)
        yield
