"""Links of the pages to files outside of docs/, such as ../shoal/run/init.py, which the site lacks.

They stay as the path of the file, behind their text where that does not name the file. All other
links must lead to a page of the site: `make site` is strict.
"""

from __future__ import annotations

import re
from posixpath import dirname, normpath
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
ENDING = re.compile(r"(/README)?\.\w+$")
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
        name = "/" + text.strip("`/")
        if any(f"/{each}".endswith(name) for each in (path, ENDING.sub("", path))):
            return f"`{path}`"
        in_brackets = markdown[link.start() - 1 : link.start()] == "("
        return f"{text}: `{path}`" if in_brackets else f"{text} (`{path}`)"

    return LINK.sub(kept, markdown)
