"""Slurm's two compressed notations, read: lists of hosts and lists of counts."""

from __future__ import annotations

import re

COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(nodelist: str) -> str:
    """The first host of a list such as `n[01-04,07],m3`: here `n01`. Brackets may occur more than
    once in a name.

    Raises:
        ValueError: there is no host in it.
    """
    # The first member of every bracket, up to the first comma that is outside of brackets.
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist.strip()).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"'{nodelist}' is no list of hosts")
    return host


def counts(text: str) -> list[int]:
    """`2(x3),1` as [2, 2, 2, 1].

    Raises:
        ValueError: it is not of that form.
    """
    found = [COUNT.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise ValueError(f"'{text}' is no list of counts such as 2(x3),1")
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))]
