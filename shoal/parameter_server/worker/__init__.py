"""A worker's side: the session without I/O and its connections."""
