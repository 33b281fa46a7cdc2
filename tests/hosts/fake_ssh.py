"""A stand-in for the ssh client: it runs the remote command here, as sshd would, in a new session.

`SHOAL_SSH="python fake_ssh.py"` makes one machine look like several hosts. The name of a host says
how it behaves: `noisy...` prints before the command, `unknown...` has a changed host key, and
`nowhere...` has no address. A host is down while there is a file of its name in the directory
FAKE_SSH_DOWN.
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
    if host.startswith("nowhere"):
        print(f"ssh: Could not resolve hostname {host}: Name not known", file=sys.stderr)
        raise SystemExit(255)
    if host.startswith("noisy"):
        print("Welcome to this host!\nSHOAL of fish", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PWD"}
    environment |= {"SHOAL_HOST": host, "LANG": ""}
    if os.path.exists(os.path.join(os.environ.get("FAKE_SSH_DOWN", ""), host)):
        print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr)
        raise SystemExit(255)
    os.chdir("/")
    os.execve("/bin/sh", ["sh", "-c", command], environment)


main()
