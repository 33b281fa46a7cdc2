"""Places where a cut would part modules that must lie in one stage.

steps      flatten │ up │ gelu │ down │ norm │ head │ softmax ──> output
wanted               └─── a pair ───┘          └─── to the end ───────
places             1    2      3      4      5      6       2 and 3 part the pair, 6 the head and the output
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import fx

from shoal.strategies.colocation import Colocation
from shoal.strategies.pipeline.steps import steps_of


def split_counts(graph: fx.Graph, wanted: Sequence[Colocation]) -> list[int]:
    """For each place, before step 0 to after the last one, how many of `wanted` a cut there
    would part.
    """
    steps = steps_of(graph)
    counts = [0] * (len(steps) + 1)
    for names, to_the_end in wanted:
        calls = [
            index
            for index, step in enumerate(steps)
            if step.op == "call_module" and _has(step, names)
        ]
        last = len(steps) - 1 if to_the_end else max(calls)
        for place in range(min(calls) + 1, last + 1):
            counts[place] += 1
    return counts


def _has(step: fx.Node, names: Set[str]) -> bool:
    target = str(step.target)
    return any(name == target or name.startswith(f"{target}.") for name in names)
