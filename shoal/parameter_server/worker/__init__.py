"""A worker's side: the session without I/O, its connections, and the aggregator of a host."""
