"""The machine of a plan where nobody names one."""

from __future__ import annotations

import pytest

from shoal.planner.find_machine import gpu_by_name


@pytest.mark.parametrize(
    ("driver_says", "memory_bytes", "preset"),
    [
        ("NVIDIA H200", 150_110_011_392, "H200 141 GB SXM"),
        ("NVIDIA H100 80GB HBM3", 84_942_979_072, "H100 80 GB SXM"),
        ("NVIDIA A100-SXM4-80GB", 84_987_740_160, "A100 80 GB SXM"),
        ("NVIDIA A100-PCIE-40GB", 42_298_834_944, "A100 40 GB SXM"),
    ],
)
def test_a_gpu_is_known_by_its_name_and_has_its_own_memory(
    driver_says: str, memory_bytes: int, preset: str
) -> None:
    found = gpu_by_name(driver_says, memory_bytes)
    assert (found.name, found.memory_bytes, found.device) == (preset, memory_bytes, "cuda")


def test_of_another_gpu_the_plan_says_that_nothing_but_its_memory_is_known() -> None:
    found = gpu_by_name("NVIDIA GeForce RTX 4090", 25e9)
    assert found.memory_bytes == 25e9
    assert "nothing is known of NVIDIA GeForce RTX 4090" in found.note
