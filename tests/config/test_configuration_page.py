from pathlib import Path

from shoal.config.reference import refreshed

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_tables_of_the_documentation_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == refreshed(page), "run `python -m shoal.config.reference docs/configuration.md`"
