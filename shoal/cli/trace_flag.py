"""--trace, of `train`, `import` and `launch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.config import trace_window

LAUNCH_OPTIONS = ("-n", "--processes", "--strategy", "--accumulate", "--output", "--trace-to")


def argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        metavar="N@S",
        help=f"trace N steps, after the first S of this start, into trace.json (--trace alone: {trace_window.DEFAULT})",
    )


def with_window(words: list[str]) -> list[str]:
    """`--trace` may stand alone, and a name or a script may follow: what no window can be is
    not taken for one.
    """
    if words[:1] not in (["train"], ["import"], ["launch"]) or "--trace" not in words:
        return words
    at = words.index("--trace")
    if words[0] == "launch" and _has_script(words[1:at]):
        return words  # the script's own
    follows = words[at + 1] if at + 1 < len(words) else ""
    if follows[:1].isdecimal() and not Path(follows).exists():
        return [*words[:at], f"--trace={follows}", *words[at + 2 :]]
    return [*words[:at], f"--trace={trace_window.DEFAULT}", *words[at + 1 :]]


def _has_script(words: list[str]) -> bool:
    """Whether a word among these, which follow `launch`, is neither an option nor an option's
    value.
    """
    before = ""
    for word in words:
        if not word.startswith("-") and before not in LAUNCH_OPTIONS:
            return True
        before = word
    return False
