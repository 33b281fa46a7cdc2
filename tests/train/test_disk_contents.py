"""Where copies lie, and which step all ranks agree on: pure logic, for any losses."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from shoal.train.checkpoint.disk_contents import (
    CheckpointPart,
    expired_names,
    skipped_sentences,
    whole_checkpoints,
)
from shoal.train.checkpoint.host_disks import HostDisks, numbered
from shoal.train.checkpoint.manifest import name_of

WORLDS = st.lists(st.integers(1, 3), min_size=1, max_size=6)  # ranks of each host


def disks_of(counts: list[int], copies: int) -> HostDisks:
    return HostDisks(tuple(disk for disk, count in enumerate(counts) for _ in range(count)), copies)


def parts_of(disks: HostDisks, step: int, sha256: str = "a") -> list[CheckpointPart]:
    """Return what each disk has after a save."""
    writers = range(len(disks.of_rank))
    listed = tuple(f"__{writer}_0.distcp" for writer in writers)
    return [
        CheckpointPart(
            name_of(step),
            sha256,
            listed,
            tuple(listed[writer] for writer in writers if disk in disks.holders(writer)),
        )
        for disk in range(disks.count)
    ]


@given(WORLDS, st.integers(0, 4))
def test_any_hosts_may_be_lost_as_many_as_there_are_copies(counts, copies):
    disks = disks_of(counts, copies)
    parts = parts_of(disks, 7)
    for lost in combinations(range(disks.count), min(copies, disks.count - 1)):
        left = [[] if disk in lost else [part] for disk, part in enumerate(parts)]
        (whole,) = whole_checkpoints(left)
        assert whole.name == name_of(7)
        assert all(holder not in lost for holders in whole.holders.values() for holder in holders)


@given(WORLDS, st.integers(0, 4))
def test_a_file_lies_on_its_own_host_and_each_copy_on_another(counts, copies):
    disks = disks_of(counts, copies)
    for writer, own in enumerate(disks.of_rank):
        holders = disks.holders(writer)
        assert holders[0] == own
        assert len(set(holders)) == len(holders) == min(copies + 1, disks.count)
        for holder in holders:
            assert disks.receiver(holder, writer) in disks.ranks(holder)


@given(
    WORLDS,
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from("ab"), st.integers(0, 5)), max_size=12),
)
def test_the_newest_step_of_which_all_is_there_is_chosen_and_saves_never_mix(counts, saved):
    """Any parts of any saves may be on any disk."""
    disks = disks_of(counts, 1)
    found: list[dict[int, CheckpointPart]] = [{} for _ in counts]
    for step, sha256, disk in saved:
        if disk < disks.count:
            found[disk][step] = parts_of(disks, step, sha256)[disk]
    left = [list(on_disk.values()) for on_disk in found]
    whole = whole_checkpoints(left)
    assert [one.name for one in whole] == sorted({one.name for one in whole}, reverse=True)
    for one in whole:
        for file, holders in one.holders.items():
            for disk in holders:
                (part,) = (part for part in left[disk] if part.name == one.name)
                assert part.sha256 == one.sha256
                assert file in part.held
    # What was not chosen lacks a file in each of its saves.
    for name in {part.name for on_disk in left for part in on_disk} - {one.name for one in whole}:
        for sha256 in "ab":
            same = [p for on_disk in left for p in on_disk if (p.name, p.sha256) == (name, sha256)]
            held = {file for part in same for file in part.held}
            assert not same or held != set(same[0].listed)
    newer = skipped_sentences(left, whole[0] if whole else None)
    assert all("is skipped: no host has a good" in sentence for sentence in newer)


def test_of_two_whole_saves_of_one_step_that_on_the_most_hosts_is_chosen():
    disks = disks_of([1, 1, 1], 2)
    new, old = parts_of(disks, 4, "b"), parts_of(disks, 4, "a")
    (whole,) = whole_checkpoints([[old[0]], [new[1]], [new[2]]])
    assert (whole.sha256, whole.disks) == ("b", (1, 2))


def test_the_newest_whole_checkpoints_and_the_best_one_stay():
    disks = disks_of([1, 1], 1)
    steps = {step: parts_of(disks, step) for step in (1, 2, 3, 4, 5)}
    interrupted = CheckpointPart(name_of(4), "a", ("__0_0.distcp",))
    left = [[steps[5][0], interrupted, steps[3][0], steps[2][0], steps[1][0]]]
    whole = whole_checkpoints(left)
    names = [part.name for part in left[0]]
    assert [one.name for one in whole] == [name_of(step) for step in (5, 3, 2, 1)]
    assert expired_names(names, whole, 2, name_of(1)) == [name_of(2)]
    assert expired_names(names, whole, 5, None) == []


def test_disks_are_numbered_by_their_first_ranks():
    assert numbered([7, 7, 3, 7, 0]) == (0, 0, 1, 0, 2)
