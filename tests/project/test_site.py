"""The site of the documents has every page, and its links lead to pages or are no links."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from shoal.cli.program import VERBS

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
        ("library.md", "[init](../shoal/run/init.py)", "`shoal/run/init.py`"),
        ("library.md", "[run](../shoal/run/)", "`shoal/run`"),
        ("library.md", "([measured](../benchmarks/x.md))", "(measured: `benchmarks/x.md`)"),
        ("gpu.md", "[benchmarks/gpu](../benchmarks/gpu/README.md)", "`benchmarks/gpu/README.md`"),
        ("library.md", "[the\ntimes](../benchmarks/x.md)", "the\ntimes (`benchmarks/x.md`)"),
        ("lessons/1.md", "[train.py](train.py)", "`lessons/train.py`"),
        ("library.md", "[torch](https://pytorch.org)", "[torch](https://pytorch.org)"),
        ("library.md", "[below](#below)", "[below](#below)"),
    ],
)
def test_links_that_leave_the_site_are_shown_as_paths(page: str, text: str, shown: str) -> None:
    assert shown_by("site_links", page, text) == shown


PAGE = """# Ranks

`rank` and [a rank](x.md) are left, as is

```
a rank
```
Two ranks, then a rank: counted
losses. An epoch is an epoch.
"""


def test_the_first_use_of_a_term_on_a_page_is_a_link_to_the_glossary() -> None:
    shown = shown_by("site_terms", "lessons/1.md", PAGE)
    ranks = "Two [ranks](../glossary.md#term-rank), then a rank"
    loss = "[counted\nlosses](../glossary.md#term-counted-loss)"
    expected = PAGE.replace("Two ranks, then a rank", ranks).replace("counted\nlosses", loss)
    assert shown == expected


def test_entries_of_the_glossary_have_anchors() -> None:
    shown = shown_by("site_terms", "glossary.md", "- **push, pull**: to send\n- a **rank**: none")
    assert shown == "- **push, pull**{#term-push}: to send\n- a **rank**: none"


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("<p><code>-n 4</code></p>", '<p><code class="whole">-n 4</code></p>'),
        ("<p><code>run.evaluate</code></p>", "<p><code>run.evaluate</code></p>"),
        ("<td><code>run/evaluate</code></td>", "<td><code>run/<wbr>evaluate</code></td>"),
        ("<td>x</td></tr></table><code>run.evaluate</code>", None),
        ("<td><code>run.ema</code> is <code>0.99999999999</code></td>", None),
        ("<pre><code>run.evaluate --hosts</code></pre>", None),
    ],
)
def test_code_breaks_where_its_words_end(html: str, shown: str | None) -> None:
    assert hook("site_code").on_page_content(html) == (shown or html)


def test_no_list_is_taken_for_a_part_of_the_paragraph_above_it() -> None:
    fence = re.compile(r"^(`{3,}|~{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
    glued = re.compile(r"^(?!#|[-*>|] |\d+\. | )\S.*\n(?:- |1\. ).*", re.MULTILINE)
    for page in (ROOT / "docs").glob("**/*.md"):
        assert glued.findall(fence.sub("", page.read_text())) == [], page


def shown_by(name: str, page: str, text: str) -> str:
    """Return a page as a hook of the site gives it to mkdocs."""
    page_of = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return str(hook(name).on_page_markdown(text, page=page_of))


def hook(name: str) -> ModuleType:
    """Import a hook of the site, which is in no package."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sections_of_docstrings_begin_below_their_names() -> None:
    pytest.importorskip("griffe")
    laid_out = hook("site_docstrings").laid_out
    assert laid_out("It.\n\nReturns: a: x\n    b.") == "It.\n\nReturns:\n    a&#58; x\n    b."
    assert (
        laid_out("Raises: as `f`.\nRaises: Lost: b.") == "Raises: as `f`.\n\nRaises:\n    Lost: b."
    )


def test_the_reference_has_the_help_of_every_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = hook("site_commands").on_page_markdown("a\n<!-- commands -->\n")
    headings = [line for line in shown.splitlines() if line.startswith("### ")]
    assert headings == [f"### shoal {verb}" for verb in VERBS]
    assert "usage: shoal launch" in shown


def test_the_site_is_built_with_strict_links(tmp_path: Path) -> None:
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "lessons" / "7-break-it.html").is_file()
