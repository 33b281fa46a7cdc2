"""The key of a run's servers: in one file while the run lives, and nowhere else."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

RUN = ("-m", "shoal", "train", "digits", "-n", "2", "--strategy", "server=1")
SETTINGS = ("--train.max_steps", "40", "--log.tensorboard", "false", "--out")


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, as far as they live."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [one for child in task.read_text().split() for one in descendants(int(child))]
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_a_key_is_in_no_argument_variable_or_log_and_is_removed_at_the_end(tmp_path: Path) -> None:
    temporary, out, log = tmp_path / "tmp", tmp_path / "run", tmp_path / "log"
    temporary.mkdir()
    looked_at: set[int] = set()
    words: dict[int, bytes] = {}
    keys: set[bytes] = set()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *RUN, *SETTINGS, str(out)],
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        while process.poll() is None:
            for path in tmp_path.rglob("server.key"):
                with suppress(OSError):
                    assert path.stat().st_mode & 0o777 == 0o600
                    keys |= {key} if len(key := path.read_bytes()) == 32 else set()
            for pid in descendants(process.pid):
                with suppress(OSError):
                    found = [
                        Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")
                    ]
                    words[pid] = words.get(pid, b"") + b"\0".join(found)
                    looked_at.add(pid)
            time.sleep(0.05)
    text = log.read_bytes()
    assert process.returncode == 0, text
    assert len(keys) == 1
    assert len(looked_at) >= 4  # the command, two ranks and a server
    (key,) = keys
    for told in (key, key.hex().encode(), base64.b64encode(key), repr(key).encode()[2:-1]):
        assert told not in text
        assert [pid for pid, word in words.items() if told in word] == []
        for path in out.rglob("*"):
            assert not path.is_file() or told not in path.read_bytes()
    assert [*tmp_path.rglob("server.key")] == []
