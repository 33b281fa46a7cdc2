"""One host's part of a world on several hosts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.launch.output import StreamName


@dataclass(frozen=True)
class HostShare:
    """The ranks that one host has in a world on several, and the way to the others.

    Args:
        first_rank: of this host; its ranks follow each other.
        world: the number of ranks on all hosts.
        address: IP address of the store in which all ranks meet.
        port: of the store.
        listener: bound to address and port on the host that serves the store, None elsewhere. It
            is closed in `start`.
        variables: of all ranks of this host, such as the network interface.
        emit: takes a rank, the name of a stream, and lines that were written to it.
    """

    first_rank: int
    world: int
    address: str
    port: int
    listener: socket.socket | None
    variables: Mapping[str, str]
    emit: Callable[[int, StreamName, list[str]], None]
