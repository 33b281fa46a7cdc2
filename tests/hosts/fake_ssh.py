"""A stand-in for the ssh client: it runs the remote command here, as sshd would, in a new session.

`SHOAL_SSH="python fake_ssh.py"` makes one machine look like several hosts. The name of a host says
how it behaves: `noisy...` prints before the command, `unknown...` has a changed host key.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--")
    assert "BatchMode=yes" in words[:end]
    host, command = words[end + 1 :]
    if host.startswith("unknown"):
        print("Host key verification failed.", file=sys.stderr)
        raise SystemExit(255)
    if host.startswith("noisy"):
        print("Welcome to this host!\nSHOAL of fish", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PWD"}
    environment |= {"SHOAL_HOST": host, "LANG": ""}
    if record := os.environ.get("FAKE_SSH_PIDS"):
        with open(record, "a") as file:
            file.write(f"{host} {os.getpid()}\n")
    os.chdir("/")
    os.execve("/bin/sh", ["sh", "-c", command], environment)


main()
