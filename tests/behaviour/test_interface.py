"""Verbs, options, settings, strategies, verified cells, public names and wire numbers stay."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from . import files, interface
from .commands import shoal

RECORD = files.read("interface")
CHANGED: dict[str, str] = files.read("changed_interface")
OPEN = (".options",)


def assert_none(lost: Iterable[str]) -> None:
    """Nothing is lost but what `changed_interface.json` gives up, with a reason."""
    assert sorted(set(lost) - CHANGED.keys()) == []


@pytest.mark.parametrize("verb", RECORD["options"])
def test_every_option_is_still_accepted(verb: str) -> None:
    # A verb is given something else that is wrong: it says the same with an option and without.
    expected = interface.refusal(verb, [])
    assert expected.code != 0
    assert "there is no verb" not in expected.err
    for words in RECORD["options"][verb]:
        if f"shoal {verb} {' '.join(words)}" not in CHANGED:
            assert interface.refusal(verb, words) == expected, words


@pytest.mark.parametrize("name", RECORD["settings"])
def test_every_setting_has_its_recorded_value(name: str) -> None:
    assert_none(_differing(name, RECORD["settings"][name], interface.settings(name)))


def test_a_command_line_of_distribuuuu_means_what_it_meant(tmp_path: Path) -> None:
    found = interface.distribuuuu(tmp_path)
    assert_none(_differing("distribuuuu", RECORD["distribuuuu"], found))


def _differing(name: str, recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    missing = object()
    keys = [key for key, value in recorded.items() if found.get(key, missing) != value]
    return [f"{name} {key}" for key in keys]


def test_every_setting_can_be_given_as_a_flag_and_in_a_file(tmp_path: Path) -> None:
    recorded = RECORD["settings"]["digits"]
    given = {key: value for key, value in recorded.items() if f"digits {key}" not in CHANGED}
    flags = [word for key, value in given.items() for word in (f"--{key}", json.dumps(value))]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(given))
    assert interface.settings("stdlib_gpt", *flags).items() >= given.items()
    assert interface.settings(str(tmp_path / "mine.yaml")).items() >= given.items()


@pytest.mark.parametrize("strategy", RECORD["strategies"])
def test_every_option_of_a_strategy_is_still_accepted(strategy: str) -> None:
    lines = RECORD["strategies"][strategy]
    assert_none(line for line in lines if shoal("config", "digits", "--strategy", line).code)


def test_every_verified_cell_has_its_recorded_verdict() -> None:
    found = interface.cells()
    assert_none(cell for cell, verdict in RECORD["cells"].items() if found.get(cell) != verdict)


def test_every_public_name_takes_its_recorded_parameters() -> None:
    found = interface.api()
    missing = [name for name in RECORD["api"] if name not in found]
    lost = {
        f"{name}({parameter})"
        for name, parameters in RECORD["api"].items()
        for parameter in parameters
        if parameter not in found.get(name, [])
    }
    assert_none([*missing, *lost])


def test_operations_of_the_wire_keep_their_numbers() -> None:
    # An operation may be renamed; its number stays, and no other operation takes it.
    recorded, found = RECORD["wire"], interface.wire()
    names = {number: name for name, number in found.items()}
    gone = {name for name, number in recorded.items() if number not in names}
    moved = {name for name, number in recorded.items() if found.get(name, number) != number}
    others = {name: recorded.keys() - {name} for name in recorded}
    taken = {name for name, number in recorded.items() if names.get(number) in others[name]}
    assert_none(f"wire {name} {recorded[name]}" for name in gone | moved | taken)
