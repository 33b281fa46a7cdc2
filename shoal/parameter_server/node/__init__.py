"""One server: the shard without I/O, and the threads around it."""
