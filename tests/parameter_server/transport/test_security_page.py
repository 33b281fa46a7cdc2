"""docs/security.md: each test that it names is there, and so is each file that it points to."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/security.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_test_that_proves_a_claim_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()))))
def test_each_file_that_the_page_links_to_exists(target: str) -> None:
    assert (PAGE.parent / target).exists()
