"""The run around the tests names what they leave, ends it, and ends tests that do not end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


EACH_TEST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SHOAL_TESTS_LOOK_S": "0"}
"""Variables of a run without plugins of others, which looks after each test."""


def run_tests(
    folder: Path, source: str, *arguments: str, run: tuple[str, ...] = ()
) -> tuple[int, str, float]:
    """Run a file of tests by the harness. Returns its exit code, its output and its seconds."""
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = " + str(ROOT))
    (folder / "test_planted.py").write_text(source)
    plugins = [f"-ptests.harness.{name}" for name in ("leftovers", "limits", "skips", "order")]
    command = [sys.executable, "-m", "tests.harness.run", *run, *plugins, "-pno:cacheprovider"]
    began_s = time.monotonic()
    done = subprocess.run(
        [*command, "-c", str(folder / "pytest.ini"), *arguments, str(folder / "test_planted.py")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), **EACH_TEST},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began_s


@pytest.fixture
def named() -> Iterator[str]:
    """Give a name for what a test leaves on the machine, and remove it after all."""
    name = f"shoal-t{os.getpid() % 10000}"
    yield name
    for command in (f"ip netns delete {name}", f"ip link delete {name}"):
        if shutil.which("ip"):
            subprocess.run(command.split(), capture_output=True)
    for path in (Path("/dev/shm", name), Path("/tmp", name), ROOT / "build" / name):
        path.unlink(missing_ok=True)


LEAVE_IN_A_PROCESS = """
import os, socket, subprocess, tempfile

kept = []

def test_child():
    subprocess.Popen(["sleep", "1000"])

def test_own_session():
    if os.fork() == 0:
        os.setsid()
        os.environ["PYTEST_CURRENT_TEST"] = "test_planted.py::test_own_session"
        os.execvp("sleep", ["sleep", "1001"])

def test_orphan():
    subprocess.run(["sh", "-c", "sleep 1002 > /dev/null 2>&1 & :"])

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_directory():
    tempfile.mkdtemp()
"""
LEAVE_ON_THE_MACHINE = """
import subprocess

def test_shared_memory():
    open("/dev/shm/{name}", "w").close()

def test_temporary_file():
    open("/tmp/{name}", "w").close()
"""
LEAVE_AS_ROOT = """
def test_namespace():
    subprocess.run("ip netns add {name}".split(), check=True)

def test_link():
    subprocess.run("ip link add {name} type veth peer name {name}p".split(), check=True)

def test_mount():
    subprocess.run("mount -t tmpfs tmpfs {folder}".split(), check=True)
"""


def test_what_a_test_leaves_in_its_process_fails_by_name_and_is_ended(tmp_path: Path) -> None:
    code, said, _ = run_tests(tmp_path, LEAVE_IN_A_PROCESS)
    assert code == 1
    for test, line in (
        ("test_child", r"process \d+: sleep 1000"),
        ("test_own_session", r"process \d+: sleep 1001"),
        ("test_port", r"socket:\[\d+\]"),
        ("test_directory", r"file /\S+"),
    ):
        assert re.search(rf"left behind.*{line}, by test_planted.py::{test}\b", said), (test, said)
    assert re.search(r"left behind: process \d+: sleep 1002 .*::test_orphan \(call\)", said), said
    assert subprocess.run(["pgrep", "-f", "^sleep 100[0-2]"], capture_output=True).stdout == b""


def test_a_clean_run_passes_and_what_is_left_on_the_machine_fails_by_name(
    tmp_path: Path, named: str
) -> None:
    # One test: what is planted here is there for every other run of this machine too.
    clean = "def test_nothing(tmp_path): (tmp_path / 'x').touch()"
    code, said, _ = run_tests(tmp_path, clean, run=("--beside", "true"))
    assert code == 0, said
    assert "left behind" not in said
    assert "files of the tests" not in said
    folder = tmp_path / "mounted"
    folder.mkdir()
    is_root = os.geteuid() == 0 and shutil.which("ip") is not None
    source = LEAVE_ON_THE_MACHINE + (LEAVE_AS_ROOT if is_root else "")
    try:
        code, said, _ = run_tests(tmp_path, source.format(name=named, folder=folder))
    finally:
        if is_root:
            subprocess.run(["umount", str(folder)], capture_output=True)
    assert code == 1
    assert f"left behind: temporary file /tmp/{named}" in said
    seen = {"test_shared_memory": f"shared memory {named}"}
    if is_root:
        seen["test_namespace"] = f"network namespace {named}"
        seen["test_link"] = f"network link {named}"
        seen["test_mount"] = f"mount {folder}"
    for test, name in seen.items():
        assert f"left behind: {name}, first seen after test_planted.py::{test}" in said, said


def test_a_test_that_hangs_fails_with_its_stack_and_the_next_one_runs(tmp_path: Path) -> None:
    source = (
        "import time, pytest\n"
        "@pytest.mark.limit(0.5)\ndef test_hangs(): time.sleep(1000)\n"
        "def test_next(): pass"
    )
    code, said, seconds = run_tests(tmp_path, source)
    assert code == 1
    assert "test_planted.py::test_hangs had not ended after 0.5 s" in said
    assert "1 failed, 1 passed" in said
    assert seconds < 60


def test_a_run_has_a_limit_and_says_so(tmp_path: Path) -> None:
    source = "import subprocess\ndef test_hangs(): subprocess.run(['sleep', '1004'])"
    code, said, _ = run_tests(tmp_path, source, run=("--limit-s", "4"))
    assert code == 124
    assert "the limit of 4 s is over: the tests are ended" in said
    assert subprocess.run(["pgrep", "-f", "^sleep 1004"], capture_output=True).stdout == b""


def test_a_command_beside_the_tests_fails_the_run(tmp_path: Path) -> None:
    source = "def test_nothing(): pass"
    code, said, _ = run_tests(tmp_path, source, run=("--beside", "ls /nowhere"))
    assert code == 2
    assert "/nowhere" in said


def test_skips_are_counted_by_reason_with_the_line_that_installs(tmp_path: Path) -> None:
    source = (
        "import pytest\n@pytest.mark.parametrize('n', range(3))\n"
        "def test_it(n): pytest.skip('there is no ssh client')"
    )
    _, said, _ = run_tests(tmp_path, source)
    assert "    3  there is no ssh client [sudo .ci/system-packages]" in said


def test_a_seed_gives_an_order(tmp_path: Path) -> None:
    source = "\n".join(f"def test_{number}(): pass" for number in range(9))
    arguments = ("--collect-only", "-q", "--order-seed")
    outputs = [run_tests(tmp_path, source, *arguments, str(seed))[1] for seed in (1, 1, 2)]
    orders = [
        [line.split("::")[1] for line in said.splitlines() if "::test_" in line] for said in outputs
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert len(orders[0]) == 9
