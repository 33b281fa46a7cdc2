"""Shoal's parameter server. To be written: the server is not finished.

What belongs here is a class `Candidate` with the methods of `benchmarks.server.candidate.Candidate`. The short way
is a `Worker` (prepare, round, close) and a `Crew` (worker, serve), as in `tcp_parts.py`; the servers sum.
"""

from __future__ import annotations

from benchmarks.server.candidate import Missing

raise Missing("Shoal's parameter server is not finished")
