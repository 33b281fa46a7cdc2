"""Parsers of Slurm's two compressed notations: lists of hosts and lists of counts."""

from __future__ import annotations

import re

COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(nodelist: str) -> str:
    """Return the first host of a list: `n01` of `n[01-04,07],m3`.

    A name may have several brackets, as in `rack[1-2]-n[1-9]`.

    Raises:
        ValueError: the list has no host.
    """
    # Replace each bracket by its first member; then the first comma ends the first name.
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist.strip()).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"'{nodelist}' is no list of hosts")
    return host


def counts(text: str) -> list[int]:
    """Return the counts of a compressed list: [2, 2, 2, 1] of `2(x3),1`.

    Raises:
        ValueError: the text is not of that form.
    """
    values: list[int] = []
    for item in text.split(","):
        match = COUNT.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"'{text}' is no list of counts such as 2(x3),1")
        count, repeat = match.groups(default="1")
        values += [int(count)] * int(repeat)
    return values
