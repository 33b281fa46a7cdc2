"""docs/strategies/server.md names the options of the code, and files that exist."""

import re
from dataclasses import fields
from pathlib import Path

from shoal.strategies.server.strategy import Server

KEPT_FOR_OLD_CONFIGURATIONS = {"connections"}
PAGE = Path(__file__).parents[3] / "docs/strategies/server.md"


def test_every_option_is_on_the_page_with_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)=[^|]*\|[^|]*\| ([^|]+?) \|$", PAGE.read_text(), re.MULTILINE)
    )
    rows["servers"] = rows.pop("server")
    options = [field for field in fields(Server) if field.name not in KEPT_FOR_OLD_CONFIGURATIONS]
    assert rows == {field.name: str(field.default).replace("True", "true") for field in options}
