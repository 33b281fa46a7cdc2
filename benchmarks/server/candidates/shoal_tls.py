"""Shoal's parameter server over TLS on loopback, as between machines."""

from benchmarks.server.candidates.shoal import Candidate as Shared
from benchmarks.server.candidates.shoal import Pusher


class Sender(Pusher):
    shares = False
    host = "127.0.0.1"


class Candidate(Shared):
    worker = Sender
