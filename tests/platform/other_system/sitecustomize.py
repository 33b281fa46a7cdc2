"""Hides what only Linux has, in every Python process that has this directory on its path.

Python and torch are imported first: their own parts for the system are not what is tested.
"""

import builtins
import io
import multiprocessing.popen_spawn_posix  # noqa: F401
import os
import socket
import sys
import sysconfig
from typing import Any

import torch.distributed  # noqa: F401

HIDDEN = ("/proc/", "/sys/", "/dev/shm")
LINUX_ONLY = {
    os: ("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "eventfd"),
    socket: ("SO_PEERCRED", "SO_PASSCRED", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT", "MSG_NOSIGNAL"),
}


def without_hidden(function: Any) -> Any:
    """Return `function` of a path, for which the directories of HIDDEN do not exist."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **kwargs)

    return call


sysconfig.get_config_vars()  # from a file that is named after the system
for module, names in LINUX_ONLY.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
builtins.open = io.open = without_hidden(io.open)
for name in ("open", "readlink", "stat", "listdir", "scandir"):
    setattr(os, name, without_hidden(getattr(os, name)))
sys.platform = "darwin"
