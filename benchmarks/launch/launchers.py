"""The command line of each launcher, as its documentation gives it for processes on one machine
without GPUs.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

BIN = Path(sys.executable).parent

Command = tuple[list[str], dict[str, str]]
"""Words, and variables added to the environment."""


def shoal(ranks: int, script: str, folder: Path) -> Command:
    return [str(BIN / "shoal"), "launch", "-n", str(ranks), script, str(folder)], {}


def torchrun(ranks: int, script: str, folder: Path) -> Command:
    words = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    return [*words, script, str(folder)], {}


def mpirun(ranks: int, script: str, folder: Path) -> Command:
    words = ["mpirun", "--oversubscribe", "-n", str(ranks), sys.executable, script, str(folder)]
    return words, {**_as_root(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}


def accelerate(ranks: int, script: str, folder: Path) -> Command:
    """Without GPUs it leaves several processes to mpirun."""
    hosts = folder / "hosts"
    hosts.write_text(f"localhost slots={ranks}\n")
    words = [str(BIN / "accelerate"), "launch", "--cpu", "--num_machines", "1"]
    words += ["--num_processes", str(ranks), "--mixed_precision", "no", "--dynamo_backend", "no"]
    words += ["--main_process_port", str(_free_port()), "--mpirun_hostfile", str(hosts)]
    words += ["--main_process_ip", "127.0.0.1", script, str(folder)]
    # It names a place to meet for several processes only.
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())} if ranks == 1 else {}
    return words, {**_as_root(), **alone}


def installed() -> dict[str, Callable[[int, str, Path], Command]]:
    """By name; what needs mpirun is left out where there is none."""
    with_mpi = {"accelerate launch": accelerate, "mpirun": mpirun} if shutil.which("mpirun") else {}
    return {"shoal launch": shoal, "torchrun": torchrun, **with_mpi}


def _as_root() -> dict[str, str]:
    """Containers run as root, which Open MPI accepts when told twice."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return dict.fromkeys(names, "1") if os.getuid() == 0 else {}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
