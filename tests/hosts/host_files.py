"""Files of a host of `namespaces`, and the script that its first process runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).parents[2]
SHELLS = ("bash", "dash", "tcsh", "fish")

Names = Literal["all", "debian", "none"]
"""Names in /etc/hosts.

    all      of every host with its address
    debian   the same, but the host's own name leads to 127.0.1.1
    none     of localhost alone; there is no name server in any case
"""

SETUP = """
set -e
hostname {name}
mount -t tmpfs -o size={disk_bytes} own-disk /mnt
mkdir -p /mnt/seen {homes}
mount --bind {folder} /mnt/seen
mount -t tmpfs tmp /tmp
mkdir -p {folder}
mount --bind /mnt/seen {folder}
umount /mnt/seen; rmdir /mnt/seen
mount -t tmpfs run /run; mkdir -p /run/sshd
mount -t tmpfs shm /dev/shm
mount --bind {etc}/passwd /etc/passwd
mount --bind {etc}/hosts /etc/hosts
mount --bind {etc}/resolv.conf /etc/resolv.conf
ip link set lo up
{sshd} -D -e -f {etc}/sshd_config 2>>{etc}/sshd.log </dev/null >/dev/null &
echo ready
exec >/dev/null 2>&1 </dev/null
while :; do sleep 1000 & wait $!; done
"""

SSHD = """
HostKey {etc}/key
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
MaxStartups {startups}
SetEnv PYTHONPATH={pythonpath} PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
AcceptEnv LANG LC_*
"""


def write_etc(etc: Path, folder: Path, names: Iterable[str], startups: str) -> None:
    """Write the files of a host's /etc.

    Args:
        etc: where they go.
        folder: of the test, with the user's key.
        names: the lines of /etc/hosts.
        startups: MaxStartups of the ssh server.
    """
    shells = [(shell, shutil.which(shell)) for shell in SHELLS]
    users = [f"{name}:x:0:0::/mnt/home/{name}:{path}" for name, path in shells if path]
    # The first entry of a user id is the one that names it.
    users.insert(0, f"root:x:0:0::/mnt/home/{SHELLS[0]}:/bin/bash")
    users.append("sshd:x:74:65534::/run/sshd:/usr/sbin/nologin")
    (etc / "passwd").write_text("\n".join(users) + "\n")
    (etc / "resolv.conf").write_text("")
    (etc / "hosts").write_text("\n".join(names) + "\n")
    (etc / "sshd_config").write_text(
        SSHD.format(etc=etc, folder=folder, pythonpath=REPOSITORY, startups=startups)
    )


def write_ssh_config(
    folder: Path, addresses: Mapping[str, str], keys: Mapping[str, str], more: str
) -> None:
    """Write the configuration of the ssh client, and the hosts that it knows.

    Args:
        addresses, keys: of each host, by name.
        more: stands before the hosts.
    """
    known = [f"{address} {keys[name]}" for name, address in addresses.items()]
    (folder / "known_hosts").write_text("".join(known))
    aliases = [f"Host {name}\n  HostName {address}\n" for name, address in addresses.items()]
    (folder / "ssh_config").write_text(
        f"{more}\n{''.join(aliases)}"
        f"Host *\n  User {SHELLS[0]}\n  IdentityFile {folder / 'user'}\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known_hosts'}\n"
        "  StrictHostKeyChecking yes\n"
    )
