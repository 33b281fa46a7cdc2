"""The process of a host that has parameter servers and no rank, until the launcher ends it.

    agent ── this process ── spawner ─┬─ server of shard 1
                                      └─ server of shard 0  (replica)

`python -m shoal.parameter_server.server_host INDEX HOSTS`: it waits for the jobs that rank 0
publishes, and keeps its part of their servers alive, as the ranks do where servers are beside them.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading

from torch.distributed import DistError

from shoal.launch.helper_spawner import HelperSpawner
from shoal.parameter_server.cluster_config import ClusterConfig
from shoal.parameter_server.job_store import JobStore
from shoal.parameter_server.launcher import ServerPool
from shoal.platform.sockets import own_address_towards


def serve_jobs(machine: int, machines: int) -> None:
    """Start the servers of one job after the other; return when the ranks are gone.

    Args:
        machine: index of this host among those of servers.
        machines: their number.
    """
    spawner = HelperSpawner()
    host = own_address_towards(os.environ["MASTER_ADDR"])
    try:
        store = JobStore()
        for number in itertools.count(1):
            coordinator, told = json.loads(store.wait_for(number))
            job = ClusterConfig.from_json(told, store.secret)
            pool = ServerPool(
                spawner, job, tuple(coordinator), host, machine=machine, machines=machines
            )
            # Once all workers have left; another job may begin before.
            threading.Thread(target=pool.close, args=(None,), daemon=True).start()
    except DistError:  # the ranks' end is for the launcher to judge
        pass


if __name__ == "__main__":
    serve_jobs(*map(int, sys.argv[1:]))
