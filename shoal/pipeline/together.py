"""What a later cut wants in one stage: a pair of layers can be in slices only where no stage begins inside it.

steps      flatten │ up │ gelu │ down │ norm │ head │ softmax ──> output
wanted               └─── a pair ───┘          └─── to the end ───────
places             1    2      3      4      5      6       2 and 3 part the pair, 6 the head and the output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from torch import fx

from shoal.pipeline.steps import steps_of
from shoal.pipeline.uncut import Uncut


class Together(NamedTuple):
    """What is to lie in one stage.

    Args:
        names: of modules that steps call, or that lie in what they call; what is computed between them belongs to it.
        to_the_end: so does all that comes after them.
    """

    names: Set[str]
    to_the_end: bool = False


Wish = Callable[[Uncut], Sequence[Together]]
"""Asked with a model that is one stage as yet, on one rank. May raise StrategyRefused."""


def parted(graph: fx.Graph, wanted: Sequence[Together]) -> list[int]:
    """For each place, before step 0 to after the last one, how many of `wanted` a cut there would part."""
    steps = steps_of(graph)
    counts = [0] * (len(steps) + 1)
    for names, to_the_end in wanted:
        calls = [index for index, step in enumerate(steps) if step.op == "call_module" and _has(step, names)]
        last = len(steps) - 1 if to_the_end else max(calls)
        for place in range(min(calls) + 1, last + 1):
            counts[place] += 1
    return counts


def _has(step: fx.Node, names: Set[str]) -> bool:
    target = str(step.target)
    return any(name == target or name.startswith(f"{target}.") for name in names)
