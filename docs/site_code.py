"""Where a browser may break the code of a sentence or of a table, such as `--hosts` and `run.save`.

It would break the first after its hyphens, and the second between any two letters. Code of a few
letters stays in one piece. In tables paths break at slashes; on a narrow screen, names break at
dots, underscores and the like too.
"""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"(<pre.*?</pre>)|(<t[dh]\b[^>]*>)|(</t[dh]>)|<code>([^<]+)</code>", re.DOTALL)
PLACES = re.compile(r"(?<=[a-zA-Z\])]([._=/,(]))(?=[a-zA-Z])")
FEW, SHORT = 20, 11
"""Letters of what stays in one piece, and of a name in a table that needs no place to break."""


def on_page_content(html: str, **_: Any) -> str:
    """Return a page with `<wbr>` and the class `whole` in its code. Called by mkdocs."""
    in_cell = False

    def marked(found: re.Match[str]) -> str:
        nonlocal in_cell
        _, opening, closing, code = found.groups()
        if code is None:
            in_cell = bool(opening) or (in_cell and not closing)
            return found[0]
        if "-" in code and len(code) <= FEW:
            return f'<code class="whole">{code}</code>'
        return f"<code>{' '.join(map(breakable, code.split(' ')))}</code>" if in_cell else found[0]

    return CODE.sub(marked, html)


def breakable(word: str) -> str:
    """Return a word with places at which it may be broken, unless it is short."""
    if len(word) <= SHORT:
        return word
    return PLACES.sub(lambda at: "<wbr>" if at[1] == "/" else '<wbr class="narrow">', word)
