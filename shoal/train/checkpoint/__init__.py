"""Checkpoints that survive what happens to machines: kills, full disks, truncated files, flipped
bits.

The protocol of a save, in order; whatever point it is stopped at, the previous checkpoint still
loads:

    [1] step-N.tmp/         made empty
    [2] *.distcp .metadata  written by all ranks through torch.distributed.checkpoint, hashed on the
    way, fsynced
    [3] vote                a failure on any rank is a CheckpointError on every rank
    [4] manifest.json       size and SHA-256 of every file, the step, the world, `info`; fsynced
    [5] step-N/             by rename; the parent directory is fsynced
    [6] verify              step-N is read back and compared with its manifest
    [7] latest, best        small text files, each replaced atomically; hints for people, `best` also for pruning
    [8] prune               to the newest `keep` that verify, and the best one

One file each: `store` is the protocol, `background` the same beside training, `search` what can be
loaded, `manifest` what makes a checkpoint whole, `tensor_files` the part that is torch's, `pieces`
what lies in its files, `exact_json` numbers that come back as they went, `durable` what reaches the
disk and whom to trust, `agreement` how ranks fail together."""

from shoal.train.checkpoint.async_save import AsyncSaver
from shoal.train.checkpoint.search import newest, read_info
from shoal.train.checkpoint.store import Checkpoints, Saved

__all__ = ["AsyncSaver", "Checkpoints", "Saved", "newest", "read_info"]
