"""Jobs that rank 0 publishes for hosts of servers alone, in the store in which all ranks meet.

    rank 0 ── job 1 ──> store <── waits for jobs 1, 2, ... ── each server host

The store has no key, so each job is sealed by the secret that the launcher has given to all hosts:
what somebody without it has written is refused. What is read is JSON, and holds no secret.
"""

from __future__ import annotations

import hmac
import os
from datetime import timedelta

# torch does not export it to type checkers, but documents it here.
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.errors import WireError
from shoal.launch.private_memory import read_secret
from shoal.parameter_server.transport.key import derived_key

SEAL_LETTERS = 64
CONNECT_LIMIT = timedelta(minutes=5)
JOB_LIMIT = timedelta(days=1000)
"""For the next job: the launcher ends who waits when the ranks have ended."""
COUNT = "shoal servers"


class JobStore:
    """A connection to the store of the ranks, which the launcher's variables name.

    Attributes:
        secret: of the launch.
    """

    def __init__(self) -> None:
        secret = read_secret()
        assert secret is not None, "the launcher of several hosts gives a secret to each of them"
        self.secret = secret
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(address, port, is_master=False, timeout=CONNECT_LIMIT)

    def publish(self, job: str) -> None:
        """Write the next job."""
        number = self._store.add(COUNT, 1)
        self._store.set(f"{COUNT} {number}", self._seal(number, job) + job)

    def wait_for(self, number: int) -> str:
        """Return a job; they are numbered from 1.

        Raises:
            DistError: the store has ended, and so have the ranks.
            WireError: somebody without the secret has written it.
        """
        self._store.wait([f"{COUNT} {number}"], JOB_LIMIT)
        message = self._store.get(f"{COUNT} {number}").decode()
        seal, job = message[:SEAL_LETTERS], message[SEAL_LETTERS:]
        if not hmac.compare_digest(seal.encode(), self._seal(number, job).encode()):
            raise WireError(
                f"job {number} in the store of the ranks was written by somebody who does not "
                "belong to them. Keep strangers out of the hosts' network."
            )
        return job

    def _seal(self, number: int, job: str) -> str:
        key = derived_key(self.secret, f"{COUNT} {number}")
        return hmac.digest(key.secret, job.encode(), "sha256").hex()
