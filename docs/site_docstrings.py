"""Docstrings as griffe reads them: each section begins after a blank line, below its name.

Shoal writes `Raises: UsageError: it is no loader.` in one line, often right below `Returns:`. Of
these griffe would take the first line for a title, or leave the section out.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"\n*^(Args|Attributes|Raises|Returns|Yields):(?: (.+))?$", re.MULTILINE)
NAMED = re.compile(r"\w+: ")


class SiteDocstrings(griffe.Extension):
    """Called by mkdocstrings with every object that it reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Lay out the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = laid_out(obj.docstring.value)


def laid_out(docstring: str) -> str:
    """Return a docstring whose sections stand below their names."""

    def section(found: re.Match[str]) -> str:
        name, text = found.groups()
        if text is None:
            return f"\n\n{name}:"
        if name in ("Returns", "Yields"):
            text = text.replace(":", "&#58;")  # or what stands before it is taken for a type
        elif not NAMED.match(text):
            return found[0]  # Raises: as `load_state`.
        return f"\n\n{name}:\n    {text}"

    return SECTION.sub(section, docstring)
