"""Parameter servers as a strategy; the servers are `shoal.parameter_server`."""
