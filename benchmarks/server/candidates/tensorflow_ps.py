"""TensorFlow's ParameterServerStrategy. It has no synchronous mode, so a round is two waits of the
coordinator.

    coordinator   schedule(push) for each worker, join   worker: variable.assign_add(gradient)
                  schedule(pull) for each worker, join   worker: read the variables, keep the values

It does not say which worker takes which call, so all push the same gradient. Gradients come from a
data set that every worker makes for itself. Variables are on the servers, one for each server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from fractions import Fraction

import torch
from torch import Tensor

from benchmarks.server.candidate import compare, shares
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker

# It reads these when it is imported.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import tensorflow as tf

PATTERN = 1000  # as in benchmarks.server.candidate.gradient


class Chief(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        roles = [("worker", index) for index in range(address.workers)] + [
            ("ps", k) for k in range(address.servers)
        ]
        addresses = _free_addresses(len(roles))
        cluster = {"worker": addresses[: address.workers], "ps": addresses[address.workers :]}
        command = [sys.executable, "-m", __name__, json.dumps(cluster)]
        self.processes = [
            subprocess.Popen([*command, role, str(index)], stdin=subprocess.PIPE)
            for role, index in roles
        ]
        _one_thread_each()
        found = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc"
        )
        self.strategy = tf.distribute.ParameterServerStrategy(found)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def prepare(self, gradient: Tensor) -> None:
        cuts = shares(len(gradient), self.address.servers)
        with self.strategy.scope():
            shards = [tf.Variable(tf.zeros(cut.stop - cut.start)) for cut in cuts]

        def gradients() -> tf.data.Dataset:
            pieces = (tf.math.floormod(tf.range(cut.start, cut.stop), PATTERN) for cut in cuts)
            return tf.data.Dataset.from_tensors(
                tuple(tf.cast(piece, tf.float32) for piece in pieces)
            ).repeat()

        @tf.function
        def push(iterator: object) -> None:
            for shard, piece in zip(shards, next(iterator), strict=True):
                shard.assign_add(piece)

        @tf.function
        def pull() -> list[tf.Tensor]:
            return [tf.identity(shard) for shard in shards]

        self.shards, self.push, self.pull, self.held = shards, push, pull, []
        self.gradients = iter(self.coordinator.create_per_worker_dataset(gradients))

    def begin(self) -> None:
        for shard in self.shards:
            shard.assign(tf.zeros_like(shard))

    def round(self) -> Sequence[Tensor]:
        for _ in range(self.address.workers):
            self.coordinator.schedule(self.push, (self.gradients,))
        self.coordinator.join()
        self.held = [self.coordinator.schedule(self.pull) for _ in range(self.address.workers)]
        self.coordinator.join()
        return []

    def check(self, gradient: Tensor, factor: Fraction) -> None:
        self.round()
        for held in self.held:
            values = [torch.from_numpy(value) for value in held.fetch()]
            compare("a worker", values, gradient, Fraction(self.address.workers))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Candidate(RoleProcesses):
    worker, chief = Chief, True


def _one_thread_each() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)


def _free_addresses(count: int) -> list[str]:
    with ExitStack() as listeners:
        ports = [
            listeners.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(count)
        ]
    return [f"127.0.0.1:{port}" for port in ports]


def main() -> None:
    """One server process: `tensorflow_ps.py CLUSTER ROLE INDEX`."""
    cluster, role, index = sys.argv[1:]
    _one_thread_each()
    cluster_spec = tf.train.ClusterSpec(json.loads(cluster))
    server = tf.distribute.Server(
        cluster_spec, job_name=role, task_index=int(index), protocol="grpc"
    )
    sys.stdin.read()  # ends when the chief does, however it does
    del server
    os._exit(0)


if __name__ == "__main__":
    main()
