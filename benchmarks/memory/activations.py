"""About how many bytes a step holds beside the states: a rough formula, from the shapes of the GPT
alone.

    block       64 for each value of the stream, in float32: 34 in 16 bits (Korthikanti et al.,
                2022), without its two masks of dropout; attention keeps no matrix of scores
    recomputed  4, its input; and all of one block at a time
    end         the last norm's input and output, the logits and their logarithms
    zero1, 2    the whole model gathered, and one unit's gradients
    zero3       two units gathered and one unit's gradients, and what is in no unit

What operations need for a moment is left out, and so is the optimizer's step, which may come on top
in backward."""

from __future__ import annotations

from benchmarks.memory.cases import BATCH, LAYERS, TIME, VOCABULARY, WIDTH, Case, gpt
from shoal.strategies.wrap_units import units

NUMBER, BLOCK = 4, 64


def rough(case: Case, ranks: int) -> int:
    """Bytes on each of `ranks`."""
    positions = BATCH // ranks * TIME
    end = 2 * NUMBER * positions * (WIDTH + VOCABULARY)
    return positions * WIDTH * _blocks(case) + end + _gathered(case, ranks)


def _blocks(case: Case) -> int:
    """Bytes for each number of the stream, when most of them are held."""
    every = case.recomputed_every
    kept = [NUMBER if every and block % every == 0 else BLOCK for block in range(LAYERS)]
    return max(sum(kept[:block]) + BLOCK for block in range(LAYERS))


def _gathered(case: Case, ranks: int) -> int:
    if "zero" not in case.strategy or (ranks == 1 and not case.offloaded):
        return 0
    model = gpt()
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units(model).values()]
    total = sum(p.numel() for p in model.parameters())
    held = 2 * max(sizes) + total - sum(sizes) if "zero3" in case.strategy else total
    return NUMBER * (held + max(sizes))
