"""The help of every verb, written into the page that has the line `<!-- commands -->`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with the commands in place of its mark. Called by mkdocs."""
    return markdown.replace(MARK, "\n".join(command_sections())) if MARK in markdown else markdown


def command_sections() -> Iterator[str]:
    """Yield a heading and the complete help of each verb that users call."""
    from shoal.cli.program import parsers

    os.environ["COLUMNS"] = "100"  # argparse folds its lines at the width of the terminal
    for name, parser in parsers()[1].items():
        yield f"### shoal {name}\n\n```text\n{parser.format_help()}```\n"
