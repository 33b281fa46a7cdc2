"""Shoal's parameter server with `shared_memory=false`: all goes over a Unix socket."""

from benchmarks.server.candidates.shoal import Candidate as Shared
from benchmarks.server.candidates.shoal import Pusher


class Sender(Pusher):
    shares = False


class Candidate(Shared):
    worker = Sender
