"""The help of the command line: its texts come from the parsers, and its examples can be typed."""

import argparse
import re
from pathlib import Path

import pytest

import shoal
from shoal import cli
from shoal.cli import job_options, program
from shoal.config.fields import all_settings
from shoal.strategies import STRATEGIES


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that succeeds, and return its stdout with single spaces."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def example_commands(verb: str) -> list[list[str]]:
    """Return the words of each command in a verb's examples, without `shoal` and the remark."""
    lines = program.VERBS[verb].EXAMPLES.splitlines()
    commands = [re.split(r" {2,}", line.strip())[0] for line in lines if line.startswith("  ")]
    return [command.split()[1:] for command in commands]


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the words of a command as `shoal` does, without running it."""
    parser, verbs = program.parsers()
    if "--" in words:  # the rest are words of the user's script
        words = words[: words.index("--")]
    if words[0] in program.TAKES_SETTINGS:
        words, _ = job_options.split(words, verbs[words[0]])
    return parser.parse_args(program._with_window(words))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"shoal {shoal.__version__}"


@pytest.mark.parametrize("verb", program.VERBS)
def test_each_verb_ends_its_help_with_examples_of_its_own(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    others = [other.EXAMPLES for name, other in program.VERBS.items() if name != verb]
    assert program.VERBS[verb].EXAMPLES not in others
    assert any(command[0] == verb for command in example_commands(verb))
    assert " ".join(program.VERBS[verb].EXAMPLES.split()) in printed(capsys, verb, "--help-all")


@pytest.mark.parametrize("verb", program.VERBS)
def test_the_help_of_each_verb_fits_on_a_screen_and_help_all_has_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main([verb, flag])
        texts[flag] = capsys.readouterr().out
    assert texts["--help"].count("\n") <= 40
    listed = re.findall(r"^ +(--\S+)", texts["--help"], re.MULTILINE)
    assert program.RARE.isdisjoint(listed)
    named = {
        option
        for action in program.parsers()[1][verb]._actions
        for option in action.option_strings
        if action.help != argparse.SUPPRESS
    }
    assert named <= {*re.split(r"[\s,\[\]]+", texts["--help-all"])}


def test_the_readme_lists_the_verbs_in_the_order_of_the_help() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("| verb |")[2].partition("\n\n")[0]
    listed = re.findall(r"^    (\S+)", program._listed_verbs(), re.MULTILINE)
    assert re.findall(r"^\| `shoal (\S+?)[ `]", table, re.MULTILINE) == listed


def test_the_program_takes_help_all_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--help-all") == printed(capsys, "--help")
    assert printed(capsys, "doctor", "--help-all") == printed(capsys, "doctor", "--help")


@pytest.mark.parametrize("verb", program.VERBS)
def test_the_examples_of_each_verb_can_be_typed_as_they_stand(verb: str) -> None:
    for command in example_commands(verb):
        assert parse(command).verb == command[0]


@pytest.mark.parametrize("verb", ["train", "config"])
def test_the_help_names_the_strategy_and_the_run_directory(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    text = printed(capsys, verb, "--help")
    assert f"--strategy LINE {all_settings()['strategy'].help} (default: ddp)" in text
    assert f"--out DIR {all_settings()['out'].help}" in text


def test_the_meaning_of_the_setting_strategy_names_every_strategy() -> None:
    words = re.split(r"[ ,:;=]+", all_settings()["strategy"].help)
    assert STRATEGIES.keys() <= set(words)


def test_settings_in_the_help_stay_settings_with_an_origin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "config", "digits", "--explain", "--strategy", "zero3", "--out=there")
    assert "strategy zero3 flag --strategy" in text
    assert "out there flag --out" in text


@pytest.mark.parametrize("flag", ["--strateg", "--ou"])
def test_settings_in_the_help_cannot_be_abbreviated(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["config", "digits", flag, "ddp"])
    assert stop.value.code == 2
    assert (
        f"did you mean '{'strategy' if flag == '--strateg' else 'out'}'" in capsys.readouterr().err
    )
