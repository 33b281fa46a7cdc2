"""A Slurm of four nodes on this machine, started for the tests and ended after them.

It needs root and Debian's packages slurmctld and slurmd (`apt install slurm-wlm`), no munge and no
accounting. Its nodes are n1 to n4, all of them this machine, with files and ports of their own. No
name server knows their names.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

NODES = 4
CONFIG = """\
ClusterName=shoaltest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={controller}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdTimeout=30
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=all Nodes=n[1-4] Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-4] State=UP PriorityTier=2
"""


def why_not() -> str | None:
    """The reason why no Slurm can be started here; None if one can."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing:
        return f"there is no {', '.join(missing)}: apt install slurm-wlm"
    return None if os.geteuid() == 0 else "slurmd on ports of its own needs root"


class SlurmCluster:
    """Running daemons.

    Args:
        folder: gets the configuration, state and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        for name in ("state", "spool"):
            (folder / name).mkdir()
        controller, *ports = free_ports(1 + NODES)
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            for i, port in enumerate(ports, 1)
        )
        self.config.write_text(
            CONFIG.format(host=host, folder=folder, controller=controller, nodes=nodes)
        )
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.config),
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        subprocess.run(["slurmctld", "-f", self.config], check=True)
        for i in range(1, NODES + 1):
            subprocess.run(["slurmd", "-N", f"n{i}", "-f", self.config], check=True)
        limit = time.monotonic() + 30
        while self.call("sinfo", "-h", "-o", "%T %D") != f"idle {NODES}":
            assert time.monotonic() < limit, (self.folder / "slurmctld.log").read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        """Cancel all jobs, and end the daemons."""
        self.call("scancel", "--user=root")
        limit = time.monotonic() + 30
        while self.call("squeue", "-h") and time.monotonic() < limit:
            time.sleep(0.2)
        pids = [int(file.read_text()) for file in self.folder.glob("*.pid")]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        limit = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < limit:
            time.sleep(0.1)

    def call(self, *command: str) -> str:
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return ended.stdout.strip()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in sockets]
