"""The suites of this repository: what is slow is listed, and a change names what to run."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness import affected
from tests.harness.slow_cases import SLOW_CASES

ROOT = Path(__file__).parents[2]
ROOT_NAMES = {
    *(".ci", ".github", ".gitignore", ".importlinter", ".pre-commit-config.yaml"),
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile"),
    *("README.md", "benchmarks", "constraints.txt", "docs", "examples", "pyproject.toml"),
    *("Dockerfile", "mkdocs.yml", "setup.py", "shoal", "tests"),
}


def files_of_git() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no checkout of git")
    return done.stdout.splitlines()


def has_slow_tests(path: Path) -> bool:
    """Return True if a file of tests uses the marker `slow`."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "slow" and "mark" in ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_each_file_with_slow_tests_is_in_the_list_with_what_it_guards() -> None:
    found = {
        path.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if has_slow_tests(path)
    }
    listed = [row.tests for row in SLOW_CASES]
    assert len(listed) == len(set(listed))
    assert found - set(listed) == set(), "add them to tests/harness/slow_cases.py"
    missing = [name for name in listed if not (ROOT / "tests" / name).exists()]
    assert missing == []


def test_each_mechanism_and_each_target_of_the_list_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for row in SLOW_CASES:
        for place in row.guarded():
            assert (ROOT / place).exists(), row
        assert re.search(rf"^{row.target}:", makefile, re.MULTILINE), row


def test_a_change_names_the_suites_of_its_mechanism() -> None:
    found = affected.targets(["shoal/shm_backend/native.c", "docs/faults.md"])
    assert "make test-collectives" in found
    assert "tests/shm_backend/test_messages_faults.py" in found[-1]
    assert affected.targets(["docs/faults.md"]) == []
    assert affected.targets(["tests/optim/test_adamw8bit.py"]) == [
        'make test-slow TESTS="tests/optim/test_adamw8bit.py"'
    ]


def test_the_root_has_what_a_reader_looks_for_and_nothing_else() -> None:
    assert {name.split("/")[0] for name in files_of_git()} == ROOT_NAMES
