"""A rank's `shoal` on a host of its own, as a cluster's operator starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.hosts.namespaces import address
from shoal.errors import LaunchError


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Variables of a rank on host `rank` + 1; rank 0 is the master."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address(1),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0",
        "SHOAL_HOST": address(
            rank + 1
        ),  # hosts are networks of one machine: ranks could reach each other's memory
    }


def shoal(arguments: list[str], environment: dict[str, str]) -> None:
    """Run it to its end. Raises LaunchError: it failed."""
    command = [sys.executable, "-m", "shoal", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(
            f"`shoal {' '.join(arguments)}` ended with {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )
