"""A stranger writes into the store of torch, in place of a rank: an error at most, and no hang."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from strangers import STRANGER, needs_root
from torch.distributed import PrefixStore, TCPStore

from shoal.errors import CollectiveFailed
from shoal.platform.processes import host_id
from shoal.shm_backend.rendezvous import Topology, rendezvous

# Torch is read before the process becomes another user's, who may not be able to enter its
# directory. A line of input is a JSON list of keys and values.
WRITES = """
import json, os, sys
from datetime import timedelta
from torch.distributed import TCPStore
os.setgroups([])
os.setresgid(USER, USER, USER)
os.setresuid(USER, USER, USER)
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=60))
for line in sys.stdin:
    for key, value in json.loads(line):
        store.set(key, value)
    print(os.getuid(), flush=True)
""".replace("USER", str(STRANGER))
NO_RECORDS = {
    "no JSON": "{",
    "deep": "[" * 50_000,
    "long": json.dumps("x" * 100_000),
    "no record": json.dumps("host"),
    "too short": json.dumps(["host", 1]),
    "a host that is no text": json.dumps([["host"], 1, {}, 0]),
    "memory that is no description": json.dumps(["host", 1, "memory", 0]),
    "no process": json.dumps(["host", -1, {}, 0]),
    "a process beyond all": json.dumps(["host", 10**30, {}, 0]),
    "no number": json.dumps(["host", True, {}, 0]),
    "two processes": json.dumps(["host", 1, {"pid": 2}, 0]),
}
SIZE = 2


@contextmanager
def stranger_at(port: int) -> Iterator[subprocess.Popen[str]]:
    """Yield a process of another user that writes what it is told."""
    command = [sys.executable, "-c", WRITES, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        yield process


def written(stranger: subprocess.Popen[str], entries: dict[str, str]) -> None:
    """Have the stranger write entries, and wait until it has."""
    assert stranger.stdin is not None
    assert stranger.stdout is not None
    stranger.stdin.write(json.dumps([*entries.items()]) + "\n")
    stranger.stdin.flush()
    assert int(stranger.stdout.readline()) == STRANGER


def meet(store: TCPStore, place: str) -> Topology:
    """Meet, as rank 0, a rank 1 that is a stranger."""
    return rendezvous(PrefixStore(place, store), 0, SIZE)


@needs_root
def test_what_a_stranger_writes_in_place_of_a_rank_opens_nothing_and_ends_in_one_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    with stranger_at(store.port) as stranger:
        for place, value in NO_RECORDS.items():
            written(stranger, {f"{place}/here/1": value, f"{place}/reached/1": '""'})
            with pytest.raises(CollectiveFailed, match=r"entry of rank 1 .* not written by Shoal"):
                meet(store, place)

        elsewhere = json.dumps(["elsewhere", 1, {}, 0])
        for answer in ("{}", "[]", "3", "{"):
            written(stranger, {f"{answer}/here/1": elsewhere, f"{answer}/reached/1": answer})
            with pytest.raises(CollectiveFailed, match="not written by Shoal"):
                meet(store, answer)

        written(stranger, {"log/here/1": elsewhere, "log/reached/1": json.dumps("a\x1b[2J" * 999)})
        reason = meet(store, "log").reason
        assert "\x1b" not in reason
        assert len(reason) < 5000

        # A stranger that says it is here, with the memory of the first process of the machine, and
        # that denies what rank 0 tells of itself.
        here = {"pid": 1, "fd": 0, "bytes": 1 << 20, "token": "a" * 32}
        lies = {
            "lies/here/0": elsewhere,
            "lies/here/1": json.dumps([host_id("pid"), 1, here, 1]),
            "lies/reached/1": '""',
        }
        written(stranger, lies)
        topology = meet(store, "lies")
        assert topology.memory is None
        assert not topology.attached
        assert topology.num_hosts == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
