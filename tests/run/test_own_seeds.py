"""Seeds of the script's own before `shoal.init`, which seeds all generators anew."""

import pytest
import torch

import shoal
from shoal.testing import world


def notes(own: int | None, seed: int) -> list[str]:
    if own is not None:
        torch.manual_seed(own)
    told: list[str] = []
    shoal.init(seed=seed, announce=told.append)
    return [line for line in told if "was seeded by" in line]


@pytest.mark.parametrize(
    ("own", "seed", "is_told"), [(5, 0, True), (None, 0, False), (5, 5, False)]
)
def test_a_seed_that_has_no_effect_is_told_with_the_line_that_gives_it(
    own: int | None, seed: int, is_told: bool
) -> None:
    of_first, of_second = world.run(2, notes, own, seed)
    assert [line for line in of_first if "shoal.init(seed=5)" in line] == of_first
    assert (len(of_first), len(of_second)) == (int(is_told), 0)
