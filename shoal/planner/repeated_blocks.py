"""Equal blocks of a model are counted once.

      forward pass    embed │ 0 │ 1 │ 2 │ ... │ 79 │ head     once, of all blocks
      counted         embed │ 0 │ 1 │ 2 │ head                both passes, with three blocks
      work            embed │ 0 │ 1 │ 1 │ ... │ 2  │ head     the middle one stands for all others

The forward pass of the whole model shows whether they are equal: its segments must be those of the
work, operation by operation. Else all blocks are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from shoal.planner.trace_model import TracedSegment

FEWEST = 8
"""Blocks from which on it is worth a forward pass more."""
KEPT = 3
"""Blocks that are counted: the first, the last, and one that stands for all between them."""


class Blocks(NamedTuple):
    """A list of modules of one class and equal parameters."""

    name: str
    container: nn.Module
    number: int


def find_blocks(model: nn.Module) -> list[Blocks]:
    """Return the outermost lists of many blocks that may be equal."""
    found: list[Blocks] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{outer.name}.") for outer in found):
            continue
        children = [*module.children()]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(children) >= FEWEST
        if is_list and len({_description(child) for child in children}) == 1:
            found.append(Blocks(name, module, len(children)))
    return found


def _description(module: nn.Module) -> tuple[object, ...]:
    parameters = module.named_parameters()
    return type(module), *((n, p.shape, p.dtype, p.requires_grad) for n, p in parameters)


@contextmanager
def three_of_each(found: Sequence[Blocks]) -> Iterator[None]:
    """Let lists of blocks have three of them, inside this context."""
    left_out = [[*blocks.container.named_children()][KEPT:] for blocks in found]
    try:
        for blocks, children in zip(found, left_out, strict=True):
            for name, _ in children:
                delattr(blocks.container, name)
        yield
    finally:
        for blocks, children in zip(found, left_out, strict=True):
            for name, child in children:
                blocks.container.add_module(name, child)


def with_all_blocks(
    segments: Sequence[TracedSegment], found: Sequence[Blocks]
) -> list[TracedSegment]:
    """Return the segments of a model of three blocks with the middle one for each that is left out.

    A list whose blocks are not called in order stays as it is, and differs from the whole model.
    """
    result = [*segments]
    for name, _, number in found:
        firsts = [
            next((i for i, s in enumerate(result) if _is_in(s.path, f"{name}.{block}")), -1)
            for block in range(KEPT)
        ]
        if -1 in firsts or firsts != sorted(firsts):
            continue
        _, second, last = firsts
        between = [
            _renamed(segment, f"{name}.1", f"{name}.{block}")
            for block in range(2, number - 1)
            for segment in result[second:last]
        ]
        behind = [_renamed(s, f"{name}.2", f"{name}.{number - 1}") for s in result[last:]]
        result = [*result[:last], *between, *behind]
    return result


def are_alike(first: Sequence[TracedSegment], second: Sequence[TracedSegment]) -> bool:
    """Return whether two forward passes have the same segments."""
    return [*map(_forward, first)] == [*map(_forward, second)]


def _forward(segment: TracedSegment) -> tuple[object, ...]:
    kept = segment.end - segment.start
    own = segment.path, segment.parameters, segment.forward
    return (*own, kept, segment.forward_most, segment.output_bytes)


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _renamed(segment: TracedSegment, name: str, other: str) -> TracedSegment:
    def rename(path: str) -> str:
        return other + path.removeprefix(name) if _is_in(path, name) else path

    return replace(
        segment, path=rename(segment.path), parameters=[*map(rename, segment.parameters)]
    )
