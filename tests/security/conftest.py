"""A directory that every user of the machine can write, as /tmp is."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def public() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="shoal-test-public-"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)
