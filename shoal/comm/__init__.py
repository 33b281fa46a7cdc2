"""Who talks to whom: the process group, and what every layout needs computed across it."""
