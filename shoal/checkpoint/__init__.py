"""Checkpoints that survive kills, full disks, truncated files and flipped bits.

The protocol of a save, in order. It may be stopped at any point: the previous checkpoint still
loads.

    [1] step-N.tmp/         an empty directory
    [2] *.safetensors       written by all ranks, hashed while they are written; each rank reads its
                            own back and compares, while the disk takes it (fsync)
    [3] consensus           a failure on any rank is a CheckpointError on every rank
    [4] index.json          where each tensor lies, known to rank 0 alone; read back
        manifest.json       size and digest of every file, the step, the world, `info`; fsynced
    [5] step-N/             by rename; the parent directory is fsynced
    [6] verify              the first rank sees the manifest and all files in their sizes
    [7] latest, best        small text files, each replaced atomically; hints for people, and `best`
                            also for pruning
    [8] prune               to the newest `keep` that verify, and the best one

A restore finds the newest manifest whose files are there; each rank compares some of them, until
all are; then each reads its tensors.

The files of this package: `store` is the protocol, `async_save` the same in the background.
`search` finds checkpoints that can be loaded, and has the steps [7] and [8]; `manifest` verifies
one. `tensor_files` writes and reads tensors in the `shard_format`, `tensor_index` tells where each
lies. `durable_io` writes to the disk, `rank_consensus` lets ranks succeed or fail together.
"""

from shoal.checkpoint.async_save import AsyncSaver
from shoal.checkpoint.search import Which, newest, read_info
from shoal.checkpoint.store import Checkpoints, Saved

__all__ = ["AsyncSaver", "Checkpoints", "Saved", "Which", "newest", "read_info"]
