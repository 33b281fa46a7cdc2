"""Requests of a user to the servers of a running job: list them, add a shard, remove a shard.

shoal servers RUN ── RUN/servers/servers.json, server.key ──────────────> coordinator
                  ── RUN/servers.json, the secret of RUN's launcher ────> coordinator of other hosts
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.errors import ServerLost, UsageError, WireError
from shoal.launch.control_channel import request
from shoal.parameter_server.codec import FIRST_USER, Op
from shoal.parameter_server.coordinator.coordinator import Address
from shoal.parameter_server.coordinator.coordinator_server import COORDINATOR
from shoal.parameter_server.transport.key import KEY_FILE, derived_key, read_key
from shoal.parameter_server.transport.settings import Transport
from shoal.platform.quantity_text import bytes_text

ADDRESS_FILE = "servers.json"
POINTER = "servers"
"""Name of the link in the run directory, which leads to the folder of key and address file."""
MIGRATION_LIMIT_S = 120.0
"""Time for the partitions of a new shard to arrive, and for those of a removed one to leave."""
RETRY_S = 0.1


def write_address_file(folder: Path, coordinator: Address, job: Transport) -> None:
    """Write the address of a job's coordinator to a file, in the folder of its key or in a run."""
    fields = {"coordinator": list(coordinator), "job": job.job, "encrypt": job.encrypt}
    (folder / ADDRESS_FILE).write_text(json.dumps(fields))


class AdminClient:
    """A connection to the coordinator of a run. Close it after use.

    Args:
        directory: the run directory.

    Raises:
        LaunchError: the run is one of several hosts, and no launcher of this machine has it.
        UsageError: the run has no servers, or has ended.
        ServerLost: its coordinator cannot be reached.
    """

    def __init__(self, directory: Path) -> None:
        (host, port), transport = _coordinator_of(directory)
        number = FIRST_USER + secrets.randbelow(2**20)
        try:
            self._peer = transport.connect((host, port), COORDINATOR, number)
        except (OSError, WireError) as error:
            raise ServerLost(
                f"{directory}: its coordinator at {host} port {port} does not answer: {error}."
            ) from error

    def servers(self) -> list[dict[str, Any]]:
        """Return an entry for each server.

        Keys: shard, role, server, state, address, pid, host, clock, moving, partitions, bytes."""
        servers: list[dict[str, Any]] = json.loads(self._request(Op.LIST)[1])
        return servers

    def add(self) -> int:
        """Add a shard. Return its number once it has its share of the partitions.

        Raises:
            ServerLost: the job has ended, or the partitions take too long.
        """
        shard = self._request(Op.ADD)[0]
        there = {"shard": shard, "role": "primary", "state": "stays"}.items()
        self._wait_for_migrations(lambda servers: any(there <= one.items() for one in servers))
        return shard

    def remove(self, shard: int) -> None:
        """Remove a shard; return when the other shards have its partitions.

        Raises:
            UsageError: there is no such shard, or it must stay.
            ServerLost: the job has ended, or the partitions take too long.
        """
        obstacle = self._request(Op.REMOVE, shard)[1].decode()
        if obstacle:
            raise UsageError(f"{obstacle}.")
        self._wait_for_migrations(lambda servers: all(one["shard"] != shard for one in servers))

    def close(self) -> None:
        self._peer.close()

    def _request(self, op: Op, shard: int = 0) -> tuple[int, bytes]:
        """Send a request; return the number and the payload of its answer."""
        self._peer.post(op, partition=shard)
        try:
            while True:
                header, payload = self._peer.receive(lambda _: None)
                # Views and placements come too: the coordinator sends them to everyone.
                if header.op == op:
                    return header.partition, bytes(payload)
        except WireError as error:
            raise ServerLost(
                f"the coordinator has hung up ({error}): it has died, or the job has ended."
            ) from error

    def _wait_for_migrations(
        self, is_expected: Callable[[Sequence[Mapping[str, Any]]], bool]
    ) -> None:
        """Wait for a list of servers that is as expected and shows no migration."""
        deadline_s = time.monotonic() + MIGRATION_LIMIT_S
        while time.monotonic() < deadline_s:
            servers = self.servers()
            if is_expected(servers) and not any(server["moving"] for server in servers):
                return
            time.sleep(RETRY_S)
        raise ServerLost(
            f"the partitions are still on their way after {MIGRATION_LIMIT_S:g} s. See "
            "`shoal servers RUN list`; training goes on."
        )


def _coordinator_of(directory: Path) -> tuple[Address, Transport]:
    """Return the address of a run's coordinator, and the transport of its job.

    On the machine of its first rank both are in the folder of the key. On that of the command with
    `--hosts` the address is in the run directory, and the launcher has the secret.
    """
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}. Give that of a run of `shoal train`.")
    folder = directory / POINTER
    with contextlib.suppress(OSError):
        address, job, encrypt = _read_address_file(folder)
        return address, Transport(read_key(folder / KEY_FILE), job, encrypt=encrypt)
    try:
        address, job, encrypt = _read_address_file(directory)
    except OSError:
        raise UsageError(
            f"{directory}: no servers run for it here. Give the directory of a run of `shoal "
            "train` that is training with --strategy server=N, on the machine of its first rank, "
            "or on that of the command that started it with --hosts. The servers of a script under "
            "`shoal launch` cannot be listed or changed."
        ) from None
    answer = next(request(directory, secret=True))
    key = derived_key(bytes.fromhex(answer["secret"]), job)
    return address, Transport(key, job, encrypt=encrypt)


def _read_address_file(folder: Path) -> tuple[Address, str, bool]:
    found = json.loads((folder / ADDRESS_FILE).read_text())
    host, port = found["coordinator"]
    return (host, port), found["job"], found["encrypt"]


def send_command(directory: Path, what: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Carry out a command of `shoal servers`, and return the servers afterwards.

    Args:
        directory: the run directory.
        what: `add`, `remove` or `list`.
        numbers: of `add`, how many shards, 1 by default; of `remove`, which shards.

    Raises: UsageError, ServerLost: as the methods of `AdminClient`.
    """
    with closing(AdminClient(directory)) as client:
        if what == "add":
            for _ in range(numbers[0] if numbers else 1):
                client.add()
        for shard in numbers if what == "remove" else ():
            client.remove(shard)
        return client.servers()


def _state_text(server: Mapping[str, Any]) -> str:
    if server["state"] != "stays":
        return {"leaving": "leaving", "waits": "waits for all its replicas"}[server["state"]]
    if server["moving"]:
        return f"{server['moving']} coming"
    return (
        "" if server["partitions"] else "no partition is left for it: a smaller part_mb cuts more"
    )


def table(servers: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of `shoal servers list`: one line for each server."""
    head = ("shard", "role", "pid", "host", "partitions", "size", "steps", "")
    rows = [
        (
            str(server["shard"]),
            server["role"],
            str(server.get("pid", "?")),
            server.get("host", "?"),
            str(server.get("partitions", "?")),
            bytes_text(server["bytes"]) if "bytes" in server else "?",
            str(server.get("clock", "?")),
            _state_text(server),
        )
        for server in servers
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in (head, *rows))
    return "\n".join("  ".join(line).rstrip() for line in lines)
