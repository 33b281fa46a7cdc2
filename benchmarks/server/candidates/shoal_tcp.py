"""Shoal's parameter server over TCP on loopback with `encrypt=false`."""

from benchmarks.server.candidates.shoal import Candidate as Shared
from benchmarks.server.candidates.shoal import Pusher


class Sender(Pusher):
    shares = False
    host = "127.0.0.1"
    encrypt = False


class Candidate(Shared):
    worker = Sender
