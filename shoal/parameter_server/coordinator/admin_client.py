"""What a user may ask of the servers of a job that runs: who holds what, one shard more, one less.

shoal servers RUN ── RUN/servers/servers.json, server.key ──> arbiter
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shoal.errors import ServerLost, UsageError, WireError
from shoal.parameter_server.codec import FIRST_USER, Op
from shoal.parameter_server.coordinator.coordinator import Address
from shoal.parameter_server.coordinator.coordinator_server import ARBITER
from shoal.parameter_server.transport.connection import QueuedConnection
from shoal.parameter_server.transport.key import KEY_FILE, read_key
from shoal.parameter_server.transport.retry import retry_until
from shoal.parameter_server.transport.settings import Transport

TOLD, POINTER = "servers.json", "servers"
SETTLE_S = 120.0
"""How long a new shard may take to have its parts, and one that leaves to be rid of them."""
RETRY_S = 0.1


def write_address_file(folder: Path, arbiter: Address, job: str) -> None:
    """Write down where a job's arbiter listens, beside its key."""
    (folder / TOLD).write_text(json.dumps({"arbiter": list(arbiter), "job": job}))


def symlink_to(link: Path, folder: Path) -> None:
    """Let `link`, in a run's directory, lead to the folder, as long as that exists."""
    if link.is_symlink():
        link.unlink()
    os.symlink(folder, link, target_is_directory=True)


class AdminClient:
    """A connection to the arbiter of a run. Close it.

    Args: directory: of the run.

    Raises:
        UsageError: it has no servers, or does not run.
        ServerLost: its arbiter cannot be reached.
    """

    def __init__(self, directory: Path) -> None:
        folder = directory / POINTER
        try:
            told = json.loads((folder / TOLD).read_text())
        except OSError:
            raise UsageError(
                f"{directory}: no servers run for it here. Give the directory of a run that is "
                "training with "
                "--strategy server=N, on the machine of its first rank."
            ) from None
        host, port = told["arbiter"]
        try:
            transport = Transport(read_key(folder / KEY_FILE), told["job"])
            number = FIRST_USER + secrets.randbelow(2**20)
            channel = transport.connect((host, port), ARBITER, number)
        except (OSError, WireError) as error:
            raise ServerLost(
                f"{directory}: its arbiter at {host}:{port} does not answer: {error}."
            ) from error
        self._peer = QueuedConnection(channel, "arbiter")

    def servers(self) -> list[dict[str, Any]]:
        """One entry for each: shard, role, server, pid, host, address, bytes, parts, clock,
        state.
        """
        found: list[dict[str, Any]] = json.loads(self._ask(Op.LIST)[1])
        return found

    def add(self) -> int:
        """One shard more; its number, once it has its share of the parts. Raises ServerLost."""
        shard = self._ask(Op.ADD)[0]
        self._settle(
            lambda servers: any(
                s["shard"] == shard and s["role"] == "primary" and s["state"] != "waits"
                for s in servers
            )
        )
        return shard

    def remove(self, shard: int) -> None:
        """Have a shard give its parts to the others and end; returns when it has. Raises
        UsageError, ServerLost.
        """
        why_not = self._ask(Op.REMOVE, shard)[1].decode()
        if why_not:
            raise UsageError(f"{why_not}.")
        self._settle(lambda servers: all(s["shard"] != shard for s in servers))

    def close(self) -> None:
        self._peer.close()

    def _ask(self, op: Op, part: int = 0) -> tuple[int, bytes]:
        self._peer.post(op, partition=part)
        try:
            while True:
                header, payload = self._peer.receive(lambda _: None)
                if header.op == op:
                    return header.partition, bytes(payload)
        except WireError as error:
            raise ServerLost(
                f"the arbiter has hung up ({error}): the job has ended, or its arbiter has died."
            ) from error

    def _settle(self, is_there: Any) -> None:
        def settled() -> bool | None:
            servers = self.servers()
            return (is_there(servers) and not any(server["moving"] for server in servers)) or None

        if retry_until(time.monotonic() + SETTLE_S, settled, every_s=RETRY_S) is None:
            raise ServerLost(
                f"the parts are still on their way after {SETTLE_S:g} s. See `shoal servers RUN "
                "list`; "
                "training goes on."
            )


def send_command(directory: Path, what: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Do what `shoal servers` asks for; the servers afterwards. Raises UsageError, ServerLost."""
    with closing(AdminClient(directory)) as control:
        if what == "add":
            for _ in range(numbers[0] if numbers else 1):
                control.add()
        for shard in numbers if what == "remove" else ():
            control.remove(shard)
        return control.servers()


def _state(server: Mapping[str, Any]) -> str:
    if server["state"] == "leaving":
        return "leaving"
    if server["state"] == "waits":
        return "waits for all its replicas"
    if server["moving"]:
        return f"{server['moving']} coming"
    return "no part is left for it: a smaller part_mb cuts more" if server.get("parts") == 0 else ""


def table(servers: Sequence[Mapping[str, Any]]) -> str:
    """The servers, one a line."""
    head = ("shard", "role", "pid", "host", "parts", "MiB", "clock", "")
    rows = [
        (
            str(server["shard"]),
            server["role"],
            str(server.get("pid", "?")),
            server.get("host", "?"),
            str(server.get("parts", "?")),
            f"{server['bytes'] / 2**20:,.1f}" if "bytes" in server else "?",
            str(server.get("clock", "?")),
            _state(server),
        )
        for server in servers
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    left = {1, 3, 7}
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
