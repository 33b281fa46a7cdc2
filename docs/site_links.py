"""Links of the pages to files outside of docs/, such as ../shoal/run/init.py, which the site lacks.

They stay as the path of the file. All other links must lead to a page of the site: `make site` is
strict.
"""

from __future__ import annotations

import re
from posixpath import dirname, normpath
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SUFFIXES = (".md", ".png", ".svg")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page without links that lead out of docs/. Called by mkdocs."""
    folder = dirname(page.file.src_uri)

    def kept(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = normpath(f"{folder}/{target}" if folder else target)
        if "://" in target or not (path.startswith("..") or not path.endswith(SUFFIXES)):
            return link[0]
        path = path.removeprefix("../")
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return LINK.sub(kept, markdown)
