"""Shoal's parameter server without shared memory, four connections used as one between a worker and a server."""

from typing import ClassVar

from benchmarks.server.candidates.shoal_tcp import Candidate as OneConnection
from benchmarks.server.candidates.shoal_tcp import Sender


class Bundled(Sender):
    connections: ClassVar[int] = 4


class Candidate(OneConnection):
    worker = Bundled
