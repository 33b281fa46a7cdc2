"""The command of the ssh client, and the words for its failures."""

import shutil
import subprocess

import pytest

from shoal.errors import UsageError
from shoal.launch.hosts.ssh_client import agent_command, describe_ssh_failure, ssh_program

PYTHON = "/opt/venv/bin/python"
needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh client")


def test_the_host_is_one_word_after_the_options_and_the_command_one_after_it():
    command = agent_command("me@b", "/opt/my tools/python", 6.0, ["ssh", "-F", "my config"])
    assert command[:4] == ["ssh", "-F", "my config", "-T"]
    assert command[-3:] == [
        "--",
        "me@b",
        "cd / && exec '/opt/my tools/python' -X utf8 -u -m shoal agent",
    ]
    assert "ServerAliveInterval=2" in command
    assert "ServerAliveInterval=1" in agent_command("b", PYTHON, 1.0, ["ssh"])


@pytest.mark.parametrize(
    "python", ["", "/a!b/python", "/it's/python", "/a\\b", "/a\nb", "venv/bin/python", "-c"]
)
def test_an_interpreter_that_a_login_shell_would_not_find_is_refused(python: str):
    with pytest.raises(UsageError, match="--python"):
        agent_command("b", python, 6.0, ["ssh"])


@pytest.mark.parametrize("shell", ["bash", "dash", "tcsh", "fish", "zsh"])
def test_every_login_shell_finds_an_interpreter_with_odd_characters_in_its_path(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    folder = tmp_path / 'odd $HOME `ü "*;&'
    folder.mkdir()
    program = folder / "python"
    program.write_text('#!/bin/sh\nread line\necho "$PWD" "$line" "$@"\n')
    program.chmod(0o755)
    line = agent_command("b", str(program), 6.0, ["ssh"])[-1]
    printed = subprocess.run(
        [shell, "-c", line], input="fed\n", capture_output=True, text=True, check=True
    )
    assert printed.stdout == "/ fed -X utf8 -u -m shoal agent\n"


def test_the_client_can_be_another_one(monkeypatch):
    monkeypatch.setenv("SHOAL_SSH", "ssh -F '/my config'")
    assert ssh_program() == ["ssh", "-F", "/my config"]
    monkeypatch.setenv("SHOAL_SSH", "ssh '")
    with pytest.raises(UsageError, match="SHOAL_SSH"):
        ssh_program()


@needs_ssh
def test_this_client_takes_the_options(tmp_path):
    """`-G` reads all options and connects to nothing."""
    config = tmp_path / "config"
    config.write_text("Host b\n RemoteCommand tmux\n LocalForward 8080 c:80\n RequestTTY force\n")
    command = agent_command("b", PYTHON, 6.0, ["ssh", "-G", "-F", str(config)])
    settings = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = settings.stdout.splitlines()
    assert "batchmode yes" in lines
    assert "clearallforwardings yes" in lines
    assert "requesttty false" in lines
    assert not [line for line in lines if line.startswith(("remotecommand", "localforward"))]


@needs_ssh
def test_the_client_forwards_nothing_and_asks_nothing(tmp_path):
    config = tmp_path / "config"
    forwards = ("ForwardAgent yes", "ForwardX11 yes", "DynamicForward 1080", "RemoteForward 9 c:80")
    others = ("LocalCommand touch x", "ControlMaster yes")
    config.write_text("\n ".join(("Host b", *forwards, *others)))
    command = agent_command("b", PYTHON, 6.0, ["ssh", "-G", "-F", str(config)])
    settings = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = settings.stdout.splitlines()
    for line in ("forwardagent no", "forwardx11 no", "permitlocalcommand no", "batchmode yes"):
        assert line in lines
    assert not [line for line in lines if line.startswith(("dynamicforward", "remoteforward"))]
    assert "controlmaster false" in lines


@pytest.mark.parametrize(
    ("code", "stderr", "output", "told"),
    [
        (
            255,
            [],
            [],
            "host b: ssh lost the connection without a word, or the login shell was killed. "
            "Log in once by hand: ssh b",
        ),
        (
            255,
            ["kex_exchange_identification: read: Connection reset by peer"],
            [],
            "host b: ssh says: kex_exchange_identification: read: Connection reset by peer. "
            "Too many clients at once? The server's MaxStartups limits them",
        ),
        (
            127,
            ["bash: line 1: exec: /opt/venv/bin/python: not found"],
            [],
            "host b: no /opt/venv/bin/python there. Give --python, or install Shoal there",
        ),
        (
            1,
            ["/opt/venv/bin/python: Command not found."],
            [],
            "host b: no /opt/venv/bin/python there. Give --python, or install Shoal there",
        ),
        (
            1,
            ["/opt/venv/bin/python: No module named shoal"],
            [],
            "host b: /opt/venv/bin/python there has no Shoal. Install it there, or give --python",
        ),
        (
            0,
            [],
            ["Welcome to b", "This account is closed"],
            "host b: the login shell ended without starting the agent: it ended with exit code 0; "
            "it printed: Welcome to b | This account is closed. Log in once by hand, and look at "
            "its start-up files: ssh b",
        ),
        (
            None,
            [],
            ["Press \x1b[1menter"],
            "host b: no agent answered in time; it printed: Press \\x1b[1menter. A start-up file "
            "of the login shell may wait for input. Log in once by hand, and look at its start-up "
            "files: ssh b",
        ),
        (
            -9,
            [],
            [],
            "host b: the login shell ended without starting the agent: it was killed by SIGKILL; "
            "it printed: nothing. Log in once by hand, and look at its start-up files: ssh b",
        ),
    ],
)
def test_a_failure_of_ssh_is_told_with_its_words_and_a_cure(code, stderr, output, told):
    assert describe_ssh_failure("b", code, stderr, output, PYTHON) == told
