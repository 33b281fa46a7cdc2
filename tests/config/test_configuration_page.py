import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_the_documentation_are_up_to_date() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    program = runpy.run_path(str(DOCS / "site_settings.py"))
    advice = "run `python docs/site_settings.py docs/configuration.md`"
    assert page == program["refreshed"](page), advice
