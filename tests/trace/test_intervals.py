"""Sets of moments, against sets of whole numbers."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.trace.breakdown import difference, intersection, total_length, union

STRETCHES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def moments(stretches: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in stretches for moment in range(start, end)}


@given(STRETCHES, STRETCHES)
def test_stretches_are_sets_of_moments(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    a, b = union(first), union(second)
    assert moments(a) == moments(first)
    assert moments(intersection(a, b)) == moments(first) & moments(second)
    assert moments(difference(a, b)) == moments(first) - moments(second)
    for found in (a, intersection(a, b), difference(a, b)):
        assert total_length(found) == len(moments(found))
        assert all(start < end for start, end in found)
        assert found == sorted(found)
