"""Settings of all test processes.

Ranks of test worlds are forked from a server that imports what stands here, once for all tests.
"""

import compileall
import contextlib
import gc
import importlib
import os
import signal
import sys
from pathlib import Path

# Several test processes share the cores, and each may have several ranks. Threads of one that wait
# for work keep a core busy. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import matplotlib.figure  # noqa: F401
import pytest
import torch.distributed.checkpoint  # noqa: F401

import shoal.train.loop  # noqa: F401
from shoal.launch import preload
from shoal.testing.world import TOOLS

ROOT = Path(__file__).parents[1]
pytest_plugins = [
    "tests.harness.leftovers",
    "tests.harness.limits",
    "tests.harness.order",
    "tests.harness.skips",
]

# A shell's background jobs are started to ignore Ctrl-C, and what ignores it at its start goes on
# to do so by design.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that others use too.
# Its examples are kept nowhere: another user may run the tests of this checkout.
hypothesis.settings.register_profile(
    "shared machine",
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package and the tests, once for all test processes.

    Each rank imports the module of its test, and each command the files of its verb. Without
    bytecode all of them would compile these: a fifth of the time of the suite.
    """
    if not hasattr(config, "workerinput"):
        for name in ("shoal", "tests"):
            compileall.compile_dir(ROOT / name, quiet=2)
        if config.getoption("numprocesses", None):
            _rewrite_assertions()


def _rewrite_assertions() -> None:
    """Let pytest rewrite the modules of tests, which each test process would do for itself.

    In a fresh checkout that takes each of them 13 seconds. pytest rewrites what is imported.
    """
    modules = [path for path in ROOT.glob("tests/**/test_*.py") if not _is_rewritten(path)]
    if not modules:
        return
    child = os.fork()
    if child == 0:
        for stream in (1, 2):  # what libraries say when they are imported, test processes say too
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        for path in modules:
            with contextlib.suppress(BaseException):  # its test process says what it is
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        os._exit(0)
    os.waitpid(child, 0)


def _is_rewritten(path: Path) -> bool:
    written = path.parent.glob(f"__pycache__/{path.stem}.*-pytest-*.pyc")
    return any(each.stat().st_mtime >= path.stat().st_mtime for each in written)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the thousands of collected tests out of each garbage collection from here on.

    The fork server of this process imports what the tests have imported of Shoal, whichever test
    starts it: each rank would take a second to do so.
    """
    gc.collect()
    gc.freeze()
    # Tests write a module, run it, and write it anew within a second. Bytecode is told apart by
    # seconds and size, so that of the first would run in place of the second.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    found = [name for name in sys.modules if name in TOOLS or name.startswith("shoal.")]
    preload.ALWAYS = (*preload.ALWAYS, *preload.TRAINING, *found, "shoal.testing.quick_exit")
