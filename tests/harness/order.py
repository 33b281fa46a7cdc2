"""`pytest --order-seed N`: the tests in a random order, that of their files and inside of each.

In any order each test begins with the same random numbers.

`pytest -n auto` starts three test processes on two cores: tests wait for ranks, locks and disks.
"""

from __future__ import annotations

import os
import random

import numpy
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, help="run the tests in a random order")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return -(-3 * (os.cpu_count() or 1) // 2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--order-seed")
    if seed is None:
        return
    # Fixtures of a module are made once, so its tests stay together. Every test process of xdist
    # must find the same order.
    generator = random.Random(seed)
    files = sorted({item.path for item in items})
    place = dict(zip(files, generator.sample(range(len(files)), len(files)), strict=True))
    generator.shuffle(items)
    items.sort(key=lambda item: place[item.path])


def pytest_runtest_setup() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
