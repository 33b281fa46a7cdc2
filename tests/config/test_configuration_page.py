import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["configuration.md", "distribuuuu.md"])
def test_the_tables_of_the_documentation_are_up_to_date(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    refreshed = runpy.run_path(str(DOCS / "site_settings.py"))["refreshed"](page)
    assert "| --- |" in page
    assert page == refreshed, f"run `python docs/site_settings.py docs/{name}`"
