"""Settings by which the processes of a job reach each other, from the launcher down to the socket.

launcher ── Transport ──> server    accept a connection, as the listener of that name
              └─────────> worker    connect to the listener of that name
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.parameter_server.codec import PLACEMENT_BYTES
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.transport.handshake import HANDSHAKE_S, Session, accept, connect
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.mac import HMAC, supported_macs
from shoal.parameter_server.transport.secure_channel import SecureChannel, is_loopback

_STATE_FACTOR = 8
"""Bound on a partition with its optimizer state, as a multiple of its values. Adam needs three."""
_MAX_METADATA_BYTES = 2**20


@dataclass(frozen=True)
class Transport:
    """Connections between the processes of one job.

    A listener is a server of the job, named by its number, or the coordinator.

    Args:
        key: proves that a process belongs to the job.
        job: the job's name, the same at both ends.
        limit_bytes: the longest payload that is sent or accepted. The default is enough for the
            coordinator's messages.
    """

    key: Key
    job: str
    limit_bytes: int = PLACEMENT_BYTES

    def for_parts(self, parts: Sequence[Partition]) -> Transport:
        """Return these settings with a limit that fits any partition with its optimizer state."""
        largest_bytes = max((part.size_bytes for part in parts), default=0)
        return replace(self, limit_bytes=_STATE_FACTOR * largest_bytes + _MAX_METADATA_BYTES)

    def for_coordinator(self) -> Transport:
        """Return these settings with a limit that fits the placement of any model."""
        return replace(self, limit_bytes=PLACEMENT_BYTES)

    def connect(
        self,
        address: tuple[str, int],
        listener: int | str,
        number: int,
        limit_s: float = HANDSHAKE_S,
    ) -> SecureChannel:
        """Connect to a listener of the job.

        Args:
            listener: number of a server, or the coordinator's name.
            number: of this end, for the listener.
            limit_s: for the connection, and again for the handshake.

        Raises:
            OSError: nobody listens at `address`.
            WireError: the listener is not that of this job, or has closed the connection.
        """
        connection = socket.create_connection(address, timeout=limit_s)
        is_remote = not is_loopback(connection)
        session = connect(
            connection,
            self.key.secret,
            self._name_of(listener),
            number,
            limit_s=limit_s,
            known=self._macs(is_remote),
        )
        return self._channel(connection, session, is_remote)

    def accept(self, connection: socket.socket, listener: int | str) -> tuple[SecureChannel, int]:
        """Make the handshake of an accepted connection, and close it if that fails.

        Args:
            listener: the name of this end, for which the peer must have asked.

        Returns:
            The channel, and the number that the peer has given.

        Raises:
            WireError: the peer does not have the key, is of another job or version, is silent or
                gone.
        """
        is_remote = not is_loopback(connection)
        name, macs = self._name_of(listener), self._macs(is_remote)
        session, number = accept(connection, self.key.secret, name, known=macs)
        return self._channel(connection, session, is_remote), number

    def _name_of(self, listener: int | str) -> str:
        return f"{self.job}/{listener}"

    def _macs(self, is_remote: bool) -> int:
        """Return the MACs that this end knows. On one host, payloads have none, so any will do."""
        return supported_macs() if is_remote else HMAC

    def _channel(
        self, connection: socket.socket, session: Session, is_remote: bool
    ) -> SecureChannel:
        return SecureChannel(
            connection, session, authenticate_payload=is_remote, limit_bytes=self.limit_bytes
        )
