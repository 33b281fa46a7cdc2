"""The site of the documents has every page, and its links lead to pages or are no links."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def pages_of(nav: Any) -> Iterator[str]:
    """Yield the pages that a navigation leads to."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav if isinstance(nav, list) else nav.values():
        yield from pages_of(entry)


def test_the_navigation_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    docs = ROOT / "docs"
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.glob("**/*.md"))
    assert sorted(pages_of(nav)) == pages


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("library.md", "[runs](runs.md#what)", "[runs](runs.md#what)"),
        ("strategies/zero.md", "[runs](../runs.md)", "[runs](../runs.md)"),
        ("library.md", "[init](../shoal/run/init.py)", "init (`shoal/run/init.py`)"),
        ("library.md", "[the\ntimes](../benchmarks/x.md)", "the\ntimes (`benchmarks/x.md`)"),
        ("lessons/1.md", "[train.py](train.py)", "`lessons/train.py`"),
        ("library.md", "[torch](https://pytorch.org)", "[torch](https://pytorch.org)"),
        ("library.md", "[below](#below)", "[below](#below)"),
    ],
)
def test_links_that_leave_the_site_are_shown_as_paths(page: str, text: str, shown: str) -> None:
    spec = spec_from_file_location("site_links", ROOT / "docs" / "site_links.py")
    assert spec is not None
    assert spec.loader is not None
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    file = SimpleNamespace(src_uri=page)
    assert hook.on_page_markdown(text, page=SimpleNamespace(file=file)) == shown


def test_the_site_is_built_with_strict_links(tmp_path: Path) -> None:
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "lessons" / "7-break-it.html").is_file()
