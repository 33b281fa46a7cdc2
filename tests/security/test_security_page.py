"""docs/security.md: it can be read in some minutes, and what it leads to exists."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/security.md"
TEXT = PAGE.read_text(encoding="utf-8")
MAX_WORDS = 2000


def test_the_page_stays_short() -> None:
    assert len(TEXT.split()) <= MAX_WORDS


def test_every_file_of_tests_of_security_is_on_the_page() -> None:
    own = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert {name for name in own if name not in TEXT} == set()
