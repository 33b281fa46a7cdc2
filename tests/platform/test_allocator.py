"""Memory that one step frees is there for the next one, in a process that has freed little yet."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from shoal.platform.allocator import keep_freed_memory
{call}
def step():
    tensors = [torch.ones(1 << 20) for _ in range(6)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 6 * (4 << 20) // 4096
"""Of the tensors of ten steps."""


def faults(call: str, **variables: str) -> int:
    """Return the pages that the system has given to a process in ten steps."""
    command = [sys.executable, "-c", PROGRAM.format(call=call)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC")}
    answer = subprocess.run(command, env=kept | variables, capture_output=True, check=True)
    return int(answer.stdout)


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
    reason="another C library has another allocator",
)
def test_freed_memory_is_taken_again_but_where_the_environment_decides() -> None:
    assert faults("keep_freed_memory()") < PAGES / 20
    own = faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")
    assert own > PAGES / 2, "the system gives new pages in each step"
