"""Run torch's own distributed_test.py, of the installed wheel, on one backend.

python torch_distributed_tests.py gloo|shoal RANKS RESULT.json [TEXT IN THE NAME ...]

The tests ask for Gloo by its name. For backend "shoal", that name makes a group of "cpu:shoal". The
result has "passed", "skipped" or the end of the error for each test."""

import importlib.util
import json
import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def main(backend: str, ranks: str, result: str, *names: str) -> None:
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=ranks,
        TEMP_DIR=tempfile.mkdtemp(),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    _provide_expecttest()
    if backend == "shoal":
        _replace_gloo()
    from torch.testing._internal.distributed import distributed_test

    # A world starts in a tenth of a second if the ranks need not import torch again.
    class OnOneBackend(  # type: ignore[misc, name-defined]
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(
                distributed_test.torch.multiprocessing.get_context("fork").Process
            )

    found = unittest.defaultTestLoader.loadTestsFromTestCase(OnOneBackend)
    chosen = [test for test in found if not names or any(n in test.id() for n in names)]
    outcome = _Outcomes(Path(result))
    unittest.TestSuite(chosen).run(outcome)


def _provide_expecttest() -> None:
    """Let torch's test classes be imported without a package that these tests do not use."""
    if importlib.util.find_spec("expecttest") is None:
        module = ModuleType("expecttest")
        module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module


def _replace_gloo() -> None:
    """Let the name "gloo" make groups of backend "shoal"."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    import shoal  # noqa: F401 - registers the backend

    def named(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            args = tuple("cpu:shoal" if value == "gloo" else value for value in args)
            if options.get("backend") == "gloo":
                options["backend"] = "cpu:shoal"
            return make(*args, **options)

        return call

    for name in ("init_process_group", "new_group"):
        replacement = named(getattr(dist, name))
        for module in (dist, distributed_c10d):
            setattr(module, name, replacement)


class _Outcomes(unittest.TestResult):
    """Writes the result of each test when it is known."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._known: dict[str, str] = {}

    def _add(self, test: unittest.TestCase, outcome: str) -> None:
        self._known[test.id().rpartition(".")[2]] = outcome
        self._path.write_text(json.dumps(self._known, indent=1))

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        self._add(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._add(test, "skipped")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._add(test, f"{err[1]}"[-1500:])

    addError = addFailure  # noqa: N815


if __name__ == "__main__":
    main(*sys.argv[1:])
