"""Owners and modes of files: what another user of the machine could have written."""

from __future__ import annotations

import grp
import io
import os
import pwd
import stat
from errno import ELOOP, EPERM
from pathlib import Path


def untrusted_reason(path: Path, *, allow_private_group: bool = False) -> str | None:
    """Return why another user could have written this path, or None.

    A digest detects only accidents, because a user who can write a file can write the digest too.

    Args:
        path: exists; a symbolic link at its end is not followed but refused.
        allow_private_group: accept that the user's own group can write, if nobody else is in it.
            Where each user has such a group, the umask is often 002.

    Raises:
        OSError: there is no such path.
    """
    status = path.lstat()
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link, and those are not followed here"
    if status.st_uid not in (user, 0):
        return (
            f"{path} belongs to user {status.st_uid}, and you are user {user}: loading it could "
            "run that user's code as you. If you trust it, make a copy of your own (cp -r)"
        )
    writers = stat.S_IWGRP | stat.S_IWOTH
    if allow_private_group and _is_private_group(status.st_gid):
        writers = stat.S_IWOTH
    if status.st_mode & writers:
        return (
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):03o}), who "
            f"could make you run their code. If you trust its contents: chmod -R go-w {path}"
        )
    return None


def _is_private_group(group: int) -> bool:
    """Return True for a group with the name of this user, in which nobody else is."""
    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def open_own(path: Path, flags: int) -> int:
    """Open or make a regular file of this user, and return its descriptor.

    A symbolic link is not followed, and a named pipe is not waited for: another user may have put
    either there, to have this process write into a file that only it can write.

    Args: flags: as for `os.open`.

    Raises:
        OSError: it cannot be opened, or is a link, no regular file, or another user's file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == ELOOP:
            raise OSError(ELOOP, f"{path} is a symbolic link, which is not followed") from None
        raise
    status = os.fstat(descriptor)
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "is no regular file"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}"
    if problem:
        os.close(descriptor)
        raise OSError(EPERM, f"{path} {problem}")
    return descriptor


def read_text_of_file(path: Path, max_bytes: int) -> str:
    """Return the text of a regular file of at most `max_bytes`.

    Anything may lie at a path that somebody names: a named pipe would be waited for without end,
    and a sparse file of a terabyte fill the memory.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with io.FileIO(descriptor) as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(EPERM, "it is no regular file")
        data = bytearray()
        # A file of /proc says that it has no bytes, and another may grow: read to the end.
        while status.st_size <= max_bytes >= len(data) and (piece := file.read(1 << 16)):
            data += piece
        if max(status.st_size, len(data)) > max_bytes:
            raise OSError(EPERM, f"it has more than {max_bytes:,} bytes")
    return data.decode("utf-8")
