"""The ports of a run as the kernel lists them, and the commands that any user can read in /proc."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "hosts"))

from hosts_command import hosts_command

SCRIPT = Path(__file__).with_name("listening_script.py")
SECRET = "5dd0c7b8a1"
LOOPBACK = "127.0.0.1"
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the sockets")


def told_by(folder: Path, *words: str) -> dict[str, list[str] | bool]:
    shutil.copy(SCRIPT, folder / "script.py")
    command = ["launch", *words, "script.py", "SHOAL_TEST_SECRET"]
    with hosts_command(folder, *command, SHOAL_TEST_SECRET=SECRET) as running:
        code, stdout, stderr = running.end()
    assert code == 0, stderr
    told: dict[str, list[str] | bool] = json.loads(stdout)
    return told


@needs_linux
def test_on_one_machine_a_script_has_torchs_store_and_gloo_on_loopback_and_no_more(
    tmp_path: Path,
) -> None:
    told = told_by(tmp_path, "-n", "2")
    # The store's, and Gloo's in each rank.
    assert len(told["listens"]) >= 3
    assert set(told["listens"]) == {LOOPBACK}


@needs_linux
@pytest.mark.slow
def test_on_several_hosts_ports_are_at_one_address_and_no_secret_is_in_a_command(
    tmp_path: Path,
) -> None:
    words = ("--hosts", "a,b", "--address", LOOPBACK, "--env", "SHOAL_TEST_SECRET")
    told = told_by(tmp_path, *words)
    assert len(told["listens"]) >= 3
    assert set(told["listens"]) == {LOOPBACK}
    assert told["is_in_commands"] is False
