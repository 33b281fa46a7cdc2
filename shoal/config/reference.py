"""The tables of docs/configuration.md, made from the settings themselves so that they cannot drift.

`python -m shoal.config.reference docs/configuration.md` writes them anew; a test fails where
somebody forgot to."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.config.convert import describe
from shoal.config.distribuuuu_keys import KEYS, DistribuuuuKey
from shoal.config.fields import Setting, all_settings
from shoal.config.yaml_subset import write


def refreshed(page: str) -> str:
    """The page with its two tables, which stand between `<!-- NAME -->` and `<!-- end of NAME
    -->`, up to date.
    """
    for name, table in (("settings", settings_table()), ("distribuuuu", distribuuuu_table())):
        opening, closing = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(opening)
        after = rest.partition(closing)[2]
        page = f"{before}{opening}\n{table}{closing}{after}"
    return page


def settings_table() -> str:
    """Every setting with its default, what it may be and what it means, as Markdown."""
    rows = (
        (f"`{name}`", f"`{write(setting.default)}`", _may_be(setting), setting.help)
        for name, setting in all_settings().items()
    )
    return _table(("setting", "default", "may be", "meaning"), rows)


def distribuuuu_table() -> str:
    """Every key of distribuuuu's with its default and what becomes of it, as Markdown."""
    rows = (
        (
            f"`{key}`",
            f"`{write(row.default)}`",
            f"`{row.setting}`" if row.setting else "none",
            _note(row),
        )
        for key, row in KEYS.items()
    )
    return _table(("key", "default there", "setting here", "KEY VALUE ..."), rows)


def _may_be(setting: Setting) -> str:
    limit = f"; {setting.check[1]}" if setting.check else ""
    return describe(setting.annotation) + limit


def _note(row: DistribuuuuKey) -> str:
    return row.note.format(value="VALUE", ours="OURS", ranks="RANKS")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
