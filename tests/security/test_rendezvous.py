"""Nobody but the user of a job can tell its ranks where to meet, or which memory to open."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from strangers import PYTHON, STRANGER, as_stranger, needs_python, needs_root, python_of_stranger

from shoal.launch.private_memory import STORE
from shoal.shm_backend.segment import NAME, TOKEN_BYTES, SharedSegment, attach
from shoal.testing import world
from shoal.watchdog.progress_word import ProgressMemory

OWNS_MEMORY = """
import os, sys
name, token, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
descriptor = os.memfd_create(name)
os.truncate(descriptor, size)
os.write(descriptor, token.encode())
print(descriptor, flush=True)
sys.stdin.read()
"""
OPENS = """
import sys
try:
    open(sys.argv[1], "r+b")
except OSError as error:
    print(type(error).__name__)
"""
READS = OPENS.replace("r+b", "rb")
TOKEN = "a" * TOKEN_BYTES
SIZE = 1 << 16


@contextmanager
def memory_of_another_process(*before: str, name: str = NAME) -> Iterator[dict[str, object]]:
    """Yield the description of memory of a process that `before` starts."""
    assert PYTHON is not None
    command = [*before, PYTHON, "-c", OWNS_MEMORY, name, TOKEN, str(SIZE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        assert process.stdout is not None
        descriptor = int(process.stdout.readline())
        yield {"pid": process.pid, "fd": descriptor, "bytes": SIZE, "token": TOKEN}


@needs_python
def test_memory_of_the_same_user_is_attached_for_reading_alone() -> None:
    with memory_of_another_process() as described:
        assert attach(described) is not None
        assert attach({**described, "token": "b" * TOKEN_BYTES}) is None
        assert attach({**described, "bytes": SIZE + 1}) is None
    own = SharedSegment(SIZE)
    attached = attach(own.description)
    assert attached is not None
    attached.tensor(0, 4, torch.float32).fill_(1.0)  # of the private mapping
    assert own.tensor(0, 4, torch.float32).tolist() == [0.0] * 4


@needs_root
@needs_python
def test_root_opens_no_memory_of_another_user_whatever_a_store_says() -> None:
    user = ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups")
    with memory_of_another_process(*user) as described:
        assert attach(described) is None


@needs_python
def test_nothing_but_a_segment_is_opened(tmp_path: os.PathLike[str]) -> None:
    with memory_of_another_process(name="other") as described:
        assert attach(described) is None
    path = os.path.join(tmp_path, "file")
    with open(path, "w") as file:
        file.write(TOKEN.ljust(SIZE))
    pipe = os.path.join(tmp_path, "pipe")
    os.mkfifo(pipe)
    for name, flags in ((path, os.O_RDWR), (pipe, os.O_RDWR), ("/dev/null", os.O_RDWR)):
        descriptor = os.open(name, flags)
        try:
            found = {"pid": os.getpid(), "fd": descriptor, "bytes": SIZE, "token": TOKEN}
            assert attach(found) is None
        finally:
            os.close(descriptor)


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"pid": "../../etc", "fd": 1, "bytes": 1, "token": ""},
        {"pid": -1, "fd": -1, "bytes": -1, "token": ""},
        {"pid": 1, "fd": [], "bytes": {}, "token": None},
    ],
)
def test_a_description_that_is_none_opens_nothing(described: dict[str, object]) -> None:
    assert attach(described) is None


def _meets() -> tuple[str, str, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    is_there = ""
    if dist.get_rank() == 0 and os.geteuid() == 0 and PYTHON is not None:
        is_there = as_stranger(PYTHON, "-c", OPENS, os.environ[STORE]).stdout.strip()
    dist.barrier()
    return os.environ.get("MASTER_PORT", "none"), is_there, total.item()


def test_ranks_of_one_machine_meet_in_memory_that_no_other_user_can_open() -> None:
    (port, opened, total), (_, _, other) = world.run(2, _meets)
    assert (port, total, other) == ("none", 2.0, 2.0)
    if os.geteuid() == 0 and PYTHON is not None:
        assert opened == "PermissionError"


@needs_root
@needs_python
def test_progress_and_stacks_of_ranks_can_be_opened_by_no_other_user() -> None:
    memory = ProgressMemory(ranks=1)
    try:
        for path in (memory.path, memory.stacks_path):
            assert path is not None
            with open(path, "r+b"):  # this user can
                pass
            assert python_of_stranger(OPENS, path).stdout.strip() == "PermissionError"
            assert python_of_stranger(READS, path).stdout.strip() == "PermissionError"
    finally:
        memory.close()
