"""The primary of each shard: the coordinator without I/O, its server, its clients."""
