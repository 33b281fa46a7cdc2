"""Links of the pages to the glossary: each term at its first use on a page.

A term with a remark in brackets, such as `epoch (of a primary)`, means something else without it,
and is linked nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

GLOSSARY = "glossary.md"
ENTRY = re.compile(r"^- \*\*(.+?)\*\*:", re.MULTILINE)
NO_TEXT = (
    r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)",  # code of several lines
    r"^#.*?$|^:::.*?(?=^\S|\Z)",  # headings, entries of mkdocstrings with their options
    r"(?P<ticks>`+).*?(?P=ticks)",
    r"!?\[[^\[\]]*\]\([^)]*\)|<[^>\n]+>|<!--.*?-->",
)
"""What is left as it is; `.` takes line ends too."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with its links to the glossary. Called by mkdocs."""
    if page.file.src_uri == GLOSSARY:
        return ENTRY.sub(lambda entry: f"- **{entry[1]}**{{#{anchor(entry[1])}}}:", markdown)
    glossary = Path(__file__).with_name(GLOSSARY).read_text(encoding="utf-8")
    return linked(markdown, relpath(GLOSSARY, dirname(page.file.src_uri) or "."), glossary)


def linked(markdown: str, target: str, glossary: str) -> str:
    """Return a page with a link to `target` at the first use of each term of the glossary."""
    anchors = {
        term: anchor(entry)
        for entry in ENTRY.findall(glossary)
        for term in entry.split(", ")
        if "(" not in term
    }
    left = dict(anchors)
    words = "|".join(pattern(term) for term in sorted(anchors, key=len, reverse=True))
    scanner = re.compile(
        "|".join((*NO_TEXT, rf"(?<![\w-])(?P<word>{words})(?![\w-])")), re.MULTILINE | re.DOTALL
    )

    def replaced(found: re.Match[str]) -> str:
        word = found["word"]
        term = next((t for t in left if word and re.fullmatch(pattern(t), word)), None)
        return found[0] if term is None else f"[{word}]({target}#{left.pop(term)})"

    return scanner.sub(replaced, markdown)


def pattern(term: str) -> str:
    """Return what matches a term, its plural, and both at the beginning of a sentence."""
    first = f"[{term[0].upper()}{term[0]}]"
    stem, ending = (term[1:-1], "(?:y|ies)") if term[-1] == "y" else (term[1:], "(?:e?s)?")
    return first + r"\s+".join(map(re.escape, stem.split(" "))) + ending


def anchor(entry: str) -> str:
    """Return the name of an entry in the address of the glossary."""
    return "term-" + "-".join(re.findall(r"\w+", entry.lower().split(", ")[0]))
