"""A script for `shoal launch`: rank 0 tells what listens among the processes of its command.

Arguments: the name of a variable, which is in the environment of these processes and no others.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

MARK = "HOSTS_TEST_MARK"
LISTENS = "0A"


def processes() -> list[Path]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={os.environ[MARK]}".encode() in (place / "environ").read_bytes():
                found.append(place)
    return found


def address_of(text: str) -> str:
    digits, _, _ = text.partition(":")
    raw = bytes.fromhex(digits)
    return ".".join(map(str, raw[::-1])) if len(raw) == 4 else digits


def listening_sockets() -> dict[str, str]:
    """Return the address of each TCP socket of this machine that listens, by its inode."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS:
                found[words[9]] = address_of(words[1])
    return found


def addresses() -> list[str]:
    """Return the addresses on which these processes listen, each once a socket."""
    sockets = listening_sockets()
    inodes = set()
    for place in processes():
        with contextlib.suppress(OSError):
            for descriptor in (place / "fd").iterdir():
                with contextlib.suppress(OSError):
                    link = os.readlink(descriptor)
                    inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    return sorted(sockets[inode] for inode in inodes & sockets.keys())


def command_lines() -> str:
    lines = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines.append((place / "cmdline").read_bytes().decode(errors="replace"))
    return "\n".join(lines)


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    secret = os.environ[sys.argv[1]]
    print(json.dumps({"listens": addresses(), "is_in_commands": secret in command_lines()}))
    sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
