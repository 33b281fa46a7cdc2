"""One cell of a measurement: processes on hosts start, step together, check their weights, and end.

host 1 ... m     worker or workers     host m + 1 ...     a server each
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from shoal.parameter_server.transport.key import new_key_file

from . import exchange
from .exchange import Work
from .worker_pool import WorkerPool

LIMIT_S = 240.0


def by_servers(work: Work, workers: int, servers: int, first_host: int) -> dict[str, float]:
    """The slowest worker's seconds of a step, and the share of the cores' time that was used.

    Args: first_host: of the servers; workers are on hosts 1 to `workers`.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, WorkerPool() as pool:
        job = exchange.new_job(work, new_key_file(Path(folder)), workers, servers)
        coordinator = pool.receive(pool.start(1, exchange.judge, job, 1), LIMIT_S)
        for shard in range(servers):
            host = first_host + shard
            pool.start(host, exchange.server, job, shard, coordinator, host)
        processes = [
            pool.start(rank + 1, exchange.worker, work, job, coordinator, rank)
            for rank in range(workers)
        ]
        return _slowest([pool.receive(process, LIMIT_S) for process in processes])


def by_ring(work: Work, workers: int) -> dict[str, float]:
    """The same without servers, by Gloo's ring."""
    with WorkerPool() as pool:
        processes = [
            pool.start(rank + 1, exchange.reduced, work, workers, rank) for rank in range(workers)
        ]
        return _slowest([pool.receive(process, LIMIT_S) for process in processes])


def link(size_bytes: int) -> float:
    """Bytes a second that one link carries, between hosts 1 and 2."""
    with WorkerPool() as pool:
        processes = [pool.start(rank + 1, exchange.link, size_bytes, rank) for rank in (0, 1)]
        answers = [pool.receive(process, LIMIT_S) for process in processes]
    return float(answers[0]["bytes_per_s"])


def _slowest(answers: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(answer[name] for answer in answers) for name in answers[0]}
