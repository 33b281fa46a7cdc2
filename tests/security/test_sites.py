"""Places of the package that listen or make a temporary file: each is known, and on the page."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/security.md").read_text(encoding="utf-8").split())
NAMES = {
    *("bind", "listen", "create_server", "start_server", "create_unix_server", "HTTPServer"),
    *("TCPServer", "UnixStreamServer", "Listener", "mkfifo", "memfd_create", "SharedMemory"),
    *("mkstemp", "mkdtemp", "mktemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory"),
    *(
        "SpooledTemporaryFile",
        "shm_open",
        "listen_at",
        "TCPStore",
        "FileStore",
        "HashStore",
        "create_device",
    ),
}
SITES = {
    # module: the calls there, and words of the row of docs/security.md that tells of them
    "cli/calibrate.py": (["TemporaryFile"], "temporary directories"),  # without a name
    "comm/mesh.py": (["FileStore", "HashStore"], "the meeting of ranks"),
    "launch/control_channel.py": (["bind", "listen"], "a socket in the run directory"),
    "launch/hosts/addresses.py": (["listen_at"], "the test of the network"),
    "launch/private_memory.py": (["memfd_create"], "the secret of a job on several hosts"),
    "launch/rank.py": (["TCPStore"], "torch's TCPStore"),
    "launch/start.py": (["create_server"], "torch's TCPStore"),
    "parameter_server/job_store.py": (["TCPStore"], "torch's TCPStore"),
    "parameter_server/launcher.py": (["listen"] * 2, "parameter servers"),
    "parameter_server/transport/key.py": (["memfd_create"], "memory without a name"),
    "parameter_server/transport/settings.py": (
        ["bind", "listen", "listen_at"],
        "Unix sockets without a file",
    ),
    "platform/sockets.py": (["create_server"], "parameter servers"),  # for those three
    "platform/files.py": (["mkdtemp"] * 2, "temporary directories"),
    "platform/torch_private/c10d.py": (["create_device"], "Gloo"),
    "shm_backend/segment.py": (["memfd_create"], "shared memory of ranks"),
    "train/entry.py": (["TemporaryDirectory"], "temporary directories"),
    "verification/script/script_verdict.py": (["TemporaryDirectory"], "temporary directories"),
    "verification/verdict.py": (["TemporaryDirectory"], "temporary directories"),
    "watchdog/progress_word.py": (["memfd_create"] * 2, "progress words"),
}


def sites() -> dict[str, Counter[str]]:
    """Return the calls that listen or make a temporary file, by the module."""
    found: dict[str, Counter[str]] = {}
    for path in sorted((ROOT / "shoal").rglob("*.py")):
        calls = Counter(
            name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and (name := called(node.func)) in NAMES
        )
        if calls:
            found[path.relative_to(ROOT / "shoal").as_posix()] = calls
    return found


def called(function: ast.expr) -> str:
    """Return the last word of a name that is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_nothing_listens_and_no_temporary_file_is_made_at_a_place_that_is_not_known() -> None:
    assert sites() == {module: Counter(calls) for module, (calls, _) in SITES.items() if calls}


def test_the_page_has_a_row_for_each_of_these_places() -> None:
    assert [words for _, words in SITES.values() if words not in PAGE] == []


def test_the_compiled_code_has_neither_sockets_nor_names_of_shared_memory() -> None:
    calls = r"\b(socket|bind|listen|shm_open|shmget|mkfifo|open|fopen|system|popen)\s*\("
    sources = list((ROOT / "shoal").rglob("*.[ch]"))
    assert sources
    assert [path.name for path in sources if re.search(calls, path.read_text())] == []


UNPICKLES = {
    # module: what it unpickles. `loads` are of processes of one launcher, or of a process's own
    # fork, over its own pipes; an Unpickler knows the names of one format and no others.
    "launch/helper_spawner.py": ["loads"],
    "launch/rank.py": ["loads"],
    "testing/world.py": ["loads"],
    "trial/child_process.py": ["loads"],
}
OBJECTS = {  # torch's collectives that unpickle
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}


def test_no_code_of_the_package_unpickles_what_others_could_send() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "shoal").rglob("*.py")):
        module = path.relative_to(ROOT / "shoal").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Attribute) or node.attr not in OBJECTS, module
            if is_of_pickle(node):
                found.setdefault(module, []).append(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), module
    assert found == UNPICKLES


def is_of_pickle(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("load", "loads", "Unpickler")
        and isinstance(node.value, ast.Name)
        and node.value.id in ("pickle", "marshal", "dill", "shelve")
    )
