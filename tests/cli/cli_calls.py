"""The command `shoal` as tests call it."""

import pytest

from shoal import cli

TINY = (
    *("--model.name", "mlp", "--model.options.hidden", "[8]"),
    *("--train.max_steps", 3, "--log.tensorboard", "false"),
    *("--train.batch_size", 100),
)
"""Settings of a run that takes a moment."""


def shoal(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a command, and return its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


def in_a_world_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables that a launcher sets for its first rank."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
