"""The first program of each task: it sets the variables of `env://`, then becomes the script.

    srun ... python -m shoal.launch.slurm.slurm_task SCRIPT ARGUMENTS

So a script that knows nothing of Slurm finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, as under `shoal launch -n`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from shoal.errors import EnvironmentConflict
from shoal.launch.environment import read


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env://` for the task with these variables.

    Raises:
        EnvironmentConflict: the variables contradict each other.
    """
    info = read(environ)
    port = info.master_port or _free_port()
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world),
        "MASTER_ADDR": info.master_address or "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main(words: list[str]) -> None:
    """Become `python WORDS`, with the variables set. Raises SystemExit where they are wrong."""
    try:
        os.environ.update(variables(os.environ))
    except EnvironmentConflict as error:
        sys.exit(f"shoal: {error}")
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
