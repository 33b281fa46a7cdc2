"""All tests of this folder are marked `gpu`; see `gpu_worlds.py` for the device they run on."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _driver() -> None:
    """Start the driver of the GPUs, whose socket stays as long as the process."""
    if torch.cuda.is_available():
        torch.cuda.init()
