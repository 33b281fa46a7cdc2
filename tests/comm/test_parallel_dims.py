import pytest

from shoal.comm.parallel_dims import ParallelDims, groups_along, problems


def test_tensor_groups_are_neighbours_and_pipelines_reach_the_farthest() -> None:
    assert groups_along(8, size=2, stride=1) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups_along(8, size=2, stride=2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups_along(8, size=2, stride=4) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups_along(6, size=6, stride=1) == (tuple(range(6)),)


@pytest.mark.parametrize(
    ("degrees", "world", "message"),
    [
        (
            ParallelDims(tensor=2, pipeline=3),
            8,
            "tensor=2 x pipeline=3 needs a multiple of 6 ranks; there are 8. Start 6 or 12 "
            "ranks, or choose sizes that divide 8.",
        ),
        (
            ParallelDims(tensor=3),
            8,
            "tensor=3 needs a multiple of 3 ranks; there are 8. Start 6 or 9 ranks",
        ),
        (
            ParallelDims(tensor=4),
            6,
            "tensor=4 needs a multiple of 4 ranks; there are 6. Start 4 or 8 ranks",
        ),
        (
            ParallelDims(tensor=4),
            3,
            "tensor=4 needs a multiple of 4 ranks; there are 3. Start 4 ranks",
        ),
        (
            ParallelDims(tensor=3, pipeline=2),
            7,
            "tensor=3 x pipeline=2 needs a multiple of 6 ranks; there are 7. Start 6 or 12",
        ),
        (ParallelDims(tensor=0), 4, "tensor=0: must be 1 or more."),
        (
            ParallelDims(tensor=2, dp_shard=4),
            4,
            "hybrid=4 shards inside groups of 4 ranks; 2 ranks do not make whole groups.",
        ),
    ],
)
def test_a_world_that_degrees_do_not_divide_is_refused_with_what_would_do(
    degrees: ParallelDims, world: int, message: str
) -> None:
    (problem,) = problems(degrees, world)
    assert problem.startswith(message)


def test_a_tensor_group_that_spans_machines_is_refused() -> None:
    assert problems(ParallelDims(tensor=2), world=6, local_world=2) == []
    (problem,) = problems(ParallelDims(tensor=2), world=6, local_world=3)
    assert "LOCAL_WORLD_SIZE=3" in problem
