import pytest

from shoal.run.startup_summary import spell_batch


@pytest.mark.parametrize(
    ("batch", "ranks", "accumulate", "text"),
    [
        (256, 8, 2, "global batch 256 = 8 ranks x 16 x 2 accumulated"),
        (256, 8, 1, "global batch 256 = 8 ranks x 32"),
        (10, 1, 1, "global batch 10 = 1 rank x 10"),
        (10, 4, 1, "global batch 10 = 4 ranks x 2 to 3"),
        (10, 3, 2, "global batch 10 = 3 ranks x 1 to 2 x 2 accumulated"),
    ],
)
def test_the_global_batch_is_spelled_out(
    batch: int, ranks: int, accumulate: int, text: str
) -> None:
    assert spell_batch(batch, ranks, accumulate) == text
