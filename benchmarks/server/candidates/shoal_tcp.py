"""Shoal's parameter server with `shared_memory=false`: every gradient and value goes over TCP."""

from benchmarks.server.candidates.shoal import Candidate as Shared
from benchmarks.server.candidates.shoal import Pusher


class Sender(Pusher):
    shares = False


class Candidate(Shared):
    worker = Sender
