"""A walk through the graph that autograd keeps of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def nodes_behind(
    start: Iterable[Any], is_end: Callable[[Any], bool] = lambda node: False
) -> Iterator[Any]:
    """Yield the nodes of a graph from some `grad_fn` on, these included, each once.

    Args:
        start: None among them stands for a tensor without a graph.
        is_end: True for a node behind which nothing is looked at.
    """
    known: set[Any] = set()
    waiting = [*start]
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        yield node
        if not is_end(node):
            waiting += [other for other, _ in node.next_functions]
