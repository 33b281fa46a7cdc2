"""torch's own tests of torch.distributed: all that pass on Gloo pass on the backend "shoal"."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("torch_distributed_tests.py")
EXCEPTIONS = {
    "test_get_backend": "the name of the backend is cpu:shoal, and the test asks for gloo",
    "test_ddp_logging_data_cpu": "the same: the name is part of the data",
}
"""Tests that pass on Gloo alone, with the reason."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_torchs_own_tests_pass_where_they_pass_on_gloo(ranks: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        gloo, ours = pool.map(lambda name: _outcomes(name, ranks, tmp_path), ("gloo", "shoal"))

    passed = [name for name, outcome in gloo.items() if outcome == "passed"]
    failed = {name: ours.get(name, "not run") for name in passed}
    failed = {name: said for name, said in failed.items() if said != "passed"}
    assert {name: failed[name] for name in set(failed) - set(EXCEPTIONS)} == {}
    assert len(passed) >= 85, "torch 2.13 has 90 to 93"


def _outcomes(backend: str, ranks: int, folder: Path) -> dict[str, str]:
    result = folder / f"{backend}.json"
    command = [sys.executable, str(PROGRAM), backend, str(ranks), str(result)]
    surroundings = {**os.environ, "TMPDIR": str(folder)}  # torch's tests leave files there
    subprocess.run(
        command, cwd=folder, env=surroundings, capture_output=True, timeout=1800, check=True
    )
    outcomes: dict[str, str] = json.loads(result.read_text())
    return outcomes
