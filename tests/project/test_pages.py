"""The pages and files at the top say what is true of the code, and point to what is there."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import shoal
from shoal.cli.program import VERBS
from shoal.config import builtin_names
from shoal.strategies import STRATEGIES, parse_line

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*/README.md")
    for path in ROOT.glob(pattern)
)
FIGURES = {
    "benchmarks/overhead": ("1.20", "1.02"),
    "benchmarks/launch": ("0.28",),
    "benchmarks/memory": ("2 %",),
    "benchmarks/restart": ("1.25",),
}
"""The figures of README.md, by the page that each is taken from."""


def section(title: str) -> str:
    """The text of README.md under a heading."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def make_targets() -> set[str]:
    """The targets of the Makefile that are no files."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {
        name for line in re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE) for name in line.split()
    }


def printed_by_make(*words: str) -> str:
    """Return what make prints in the repository."""
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_points_to_is_there(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = {target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target}
    missing = [
        target for target in sorted(targets) if not (ROOT / page).parent.joinpath(target).exists()
    ]
    assert missing == []


def test_every_strategy_line_that_another_tool_is_answered_with_exists() -> None:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    right = " ".join(row.split(" | ")[1] for row in page.splitlines() if row.startswith("| "))
    words = re.findall(r"`(?:--strategy )?([a-z0-9]+(?:[,=][^`\s]+)?)`", right)
    lines = {word for word in words if re.split("[,=]", word)[0] in STRATEGIES}
    assert len(lines) >= 15
    for line in lines:
        parse_line(re.sub("=[NRF]$", "=2" if "topk" not in line else "=0.1", line))


def test_each_variable_of_the_reference_is_read_by_the_code() -> None:
    named = set(re.findall(r"`(SHOAL_\w+)`", (ROOT / "docs/reference.md").read_text()))
    assert len(named) >= 10
    code = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("shoal/**/*.py"))
    assert {name for name in named if f'"{name}"' not in code} == set()


def test_the_readme_has_a_row_for_each_verb_and_no_other() -> None:
    rows = re.findall(r"^\| `shoal ([a-z-]+)", section("One command"), re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


def test_the_readme_names_each_strategy_and_each_built_in_experiment() -> None:
    cells = re.findall(r"^\| (\[.*?) \|", section("Strategies"), re.MULTILINE)
    words = {word for cell in cells for word in re.findall(r"[a-z0-9]+", cell)}
    assert STRATEGIES.keys() <= words
    assert all(f"`{name}`" in section("One command") for name in builtin_names())


@pytest.mark.parametrize("page", FIGURES)
def test_a_figure_of_the_readme_stands_on_the_page_that_it_is_taken_from(page: str) -> None:
    measured = (ROOT / page / "README.md").read_text(encoding="utf-8")
    assert f"]({page})" in README
    for figure in FIGURES[page]:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", README)
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", measured)


def test_bare_make_lists_every_target_with_a_sentence() -> None:
    listed = dict(re.findall(r"^  (\S+) +(\S.*\.)$", printed_by_make(), re.MULTILINE))
    assert listed.keys() == make_targets()
    assert printed_by_make("help") == printed_by_make()


def test_the_version_stands_in_one_place_and_the_changelog_knows_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shoal.__version__"}
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert shoal.__version__ in headings[:2]


def test_the_licence_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project["project"]["license"] == citation["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert licence.rstrip().endswith("limitations under the License.")


def test_continuous_integration_runs_the_tests_on_every_python_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    named = [
        text.removeprefix(prefix) for text in project["classifiers"] if text.startswith(prefix)
    ]
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    assert job["strategy"]["matrix"]["python-version"] == named
    assert project["requires-python"] == f">={named[0]}"
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


@pytest.mark.parametrize(
    ("job", "command"),
    [
        ("pages", "make test-slow TESTS=tests/project"),
        ("site", "make site"),
        ("hugging-face", "make test-hf"),
    ],
)
def test_continuous_integration_has_a_job_for(job: str, command: str) -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert [step["run"] for step in jobs[job]["steps"] if "run" in step] == [command]
    assert command.split()[1] in make_targets()


def test_the_tests_on_real_hosts_say_what_could_not_be_installed(tmp_path: Path) -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    (line,) = [step["run"] for step in jobs["real"]["steps"] if "run" in step]
    assert line.endswith(" .ci/run-real")
    assert ".ci/system-packages\n" in (ROOT / ".ci/run-real").read_text()
    (tmp_path / "bash").symlink_to("/bin/bash")
    done = subprocess.run(
        ["/bin/bash", ROOT / ".ci/system-packages"],
        env={"PATH": str(tmp_path), "SBIN": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "openssh-server" in done.stderr
    assert done.stderr.endswith("will be skipped: there is no apt-get here\n")


def test_the_hooks_before_a_commit_are_those_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = {hook["entry"].removesuffix(" --force-exclude") for hook in hooks}
    recipe = printed_by_make("--dry-run", "--assume-old=.venv/.test", "lint")
    assert entries == {line.removesuffix(" .") for line in recipe.splitlines()}
