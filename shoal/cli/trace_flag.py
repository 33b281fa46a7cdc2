"""The flag --trace of `train`, `import` and `launch`, whose value may be left out."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli import cluster_options, foreign_flags, host_options
from shoal.config import trace_window

# Options of `launch` that take a value.
LAUNCH_OPTIONS = (
    *("-n", "--processes", "--strategy", "--accumulate", "--output", "--trace-to"),
    *("--allreduce", "--hang-limit"),
    *cluster_options.WITH_VALUE,
    *host_options.WITH_VALUE,
    *foreign_flags.WITH_VALUE,
)


def argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        metavar="N@S",
        help="trace N steps, after the first S of this start, into trace.json (--trace alone: "
        f"{trace_window.DEFAULT})",
    )


def with_window(words: list[str]) -> list[str]:
    """Return the words with a value for `--trace`.

    argparse would take the next word as the value, which may be an experiment or a script. So a
    word is the value only if it begins with a digit and is no file.
    """
    if words[:1] not in (["train"], ["import"], ["launch"]) or "--trace" not in words:
        return words
    index = words.index("--trace")
    if words[0] == "launch" and _has_script(words[1:index]):
        return words  # a flag of the script
    following = words[index + 1] if index + 1 < len(words) else ""
    if following[:1].isdecimal() and not Path(following).exists():
        return [*words[:index], f"--trace={following}", *words[index + 2 :]]
    return [*words[:index], f"--trace={trace_window.DEFAULT}", *words[index + 1 :]]


def _has_script(words: list[str]) -> bool:
    """Return True if one of the words after `launch` is neither an option nor its value."""
    previous = ""
    for word in words:
        if not word.startswith("-") and previous not in LAUNCH_OPTIONS:
            return True
        previous = word
    return False
