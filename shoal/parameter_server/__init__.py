"""The parameter server: processes that own the parameters, and workers that push gradients.

    worker/ ──────── PUSH, STEP ────────> node/ (primary) ── REPLICATE ──> node/ (backup)
       ^  <───────── PARAMS ────────────    │  └──────────── TRANSFER ───> node/ of another shard
       └─ VIEW, PLACEMENT ─ coordinator/ <──┘ HEARTBEAT
    launcher/ starts coordinator and servers; all communicate over transport/; replay/ repeats a run

The way of a push:    worker/client.py -> session.py -> shard_connection.py -> transport/
 -> node/node_server.py -> worker_requests.py -> receive_buffers.py -> shard.py -> aggregation.py
 -> partition_state.py, the optimizer's step -> replication_acks.py, until all backups have it.
The way of the answer: node/shard.py -> node_server.py -> connected_workers.py -> transport/
 -> worker/shard_connection.py -> session.py -> client.py.

Messages are in events.py, their form in codec.py; partitioning.py divides the parameters. `Shard`
(node/), `Coordinator` (coordinator/) and `WorkerSession` (worker/) are state machines without I/O.
"""
