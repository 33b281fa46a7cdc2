"""The parameter server: processes that own the parameters, and workers that push gradients.

                 PUSH, STEP                    REPLICATE
    worker/ ───────────────────> node/ ────────────────────> node/ (backup)
            <───────────────── (primary) ── TRANSFER ──────> node/ (primary of another shard)
       ^         PARAMS            ^ │
       └─ VIEW, PLACEMENT ───┐     │ │ HEARTBEAT     launcher.py starts coordinator and servers
                             │     │ v               transport/  carries all messages
                            coordinator/             server_host.py  does, on a host without ranks
                                                     recorded_order.py  repeats a run

A push:      worker/client.py, session.py, socket_network.py, transport/; then
             node/node_server.py, worker_requests.py, server_memory.py, shard.py,
             partition_state.py (sum and optimizer), shard_replica.py (wait for all backups).
Its answer:  node/shard.py, node_server.py, worker_requests.py, transport/; then
             worker/socket_network.py, session.py, client.py.

Messages are in events.py, their form in codec.py; partitioning.py divides the parameters. `Shard`,
`Coordinator` and `WorkerSession` are state machines without I/O.
"""
