"""The tables of docs/configuration.md and docs/distribuuuu.md, generated from the settings.

`python docs/site_settings.py docs/configuration.md docs/distribuuuu.md` writes them. A test fails
where a page is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.config.distribuuuu import KEYS, NOTES
from shoal.config.fields import Setting, all_settings
from shoal.config.yaml_subset import write
from shoal.platform.plain_types import describe


def refreshed(page: str) -> str:
    """Return the page with new tables, each between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    for name, table in (("settings", settings_table()), ("distribuuuu", distribuuuu_table())):
        before, opening, rest = page.partition(f"<!-- {name} -->")
        _, closing, after = rest.partition(f"<!-- end of {name} -->")
        if opening:
            page = f"{before}{opening}\n{table}{closing}{after}"
    return page


def settings_table() -> str:
    """Return a table in Markdown: every setting, its default, its meaning and its values."""
    rows = (
        (f"`{name}`", f"`{write(setting.default)}`", setting.help + _limits(setting))
        for name, setting in all_settings().items()
    )
    return _table(("setting", "default", "meaning"), rows)


def distribuuuu_table() -> str:
    """Return the keys of distribuuuu with our settings for them, as a table."""
    rows = (
        (
            f"`{key}`",
            f"`{row.setting}`" if row.setting else "none",
            # Placeholders, because a note contains the values of a command line.
            NOTES.get(key, "the same").format(value="VALUE", ours="OURS", ranks="RANKS"),
        )
        for key, row in KEYS.items()
    )
    return _table(("key", "setting here", "what the pair KEY VALUE does"), rows)


def _limits(setting: Setting) -> str:
    """Return what default and meaning do not tell of the values, in brackets."""
    kind = describe(setting.annotation)
    words = []
    if kind.endswith("none") and setting.default is not None:
        words.append("or none")
    if not all(word in setting.help for word in kind.removeprefix("one of ").split(", ")):
        words += [kind] if kind.startswith("one of ") else []
    if setting.check:
        limit = setting.check[1].removeprefix("must be ").partition(":")[0]
        words.append(limit.replace("must not be negative", ">= 0").replace("greater than", ">"))
    return f" ({'; '.join(words)})" if words else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = ""
    for row in (head, ["---"] * len(head), *rows):
        cells = [cell.replace("|", r"\|") for cell in row]
        text += f"| {' | '.join(cells)} |\n"
    return text


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
