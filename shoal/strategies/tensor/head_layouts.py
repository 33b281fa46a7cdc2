"""The ways in which a script may count the heads of its attention, and its widths.

A rank has 1/T of the heads. Then which numbers of the script must be 1/T is not told by names:

      self.n_head         x.size(-1)     self.n_embd       the script
      1/T                 full           full              views by n_head and a width of a head
      1/T                 1/T            1/T               C // self.n_head; split(self.n_embd)
      full                full           full              views by -1 and a width of a head

And a fused matrix may hold the query, key and value of all heads one after the other, or those of
each head together. So the layouts are tried in the first forward pass, each against the full
model, and the first that gives its output is used. None of them changes what a rank stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

Attribute = tuple[nn.Module, str]
"""A module and the name of one of its attributes."""

EMBEDDING_WIDTHS = (
    *("n_embd", "n_embed", "embed_dim", "emb_dim", "embedding_dim", "embed_size", "hidden_size"),
    *("hidden_dim", "d_model", "dim", "d_out", "width", "model_dim"),
)
"""Names of attributes that may be used as the width of all heads, if they are equal to it."""


@dataclass(frozen=True)
class HeadLayout:
    """One way to run attention on this rank's heads.

    Args:
        attributes: those that are 1/T in the forward pass.
        is_narrowed: inputs look as wide as this rank's heads.
        parts: matrices in a fused column layer, 3 for query, key and value one after the other.
    """

    attributes: tuple[Attribute, ...]
    is_narrowed: bool
    parts: int


def head_layouts(
    counts: Sequence[Attribute], widths: Sequence[Attribute], parts: int
) -> Iterator[HeadLayout]:
    """Yield layouts, the usual ones first.

    Args:
        counts: numbers of heads, and widths of all heads by their names.
        widths: other attributes that are equal to the width of all heads.
        parts: 3 for a fused matrix, 1 for matrices of their own.
    """
    all_attributes = (*counts, *widths)
    for parts_tried in (3, 1) if parts == 3 else (1,):
        yield HeadLayout(tuple(counts), False, parts_tried)
        yield HeadLayout(all_attributes, True, parts_tried)
        if widths:
            yield HeadLayout(all_attributes, False, parts_tried)
            yield HeadLayout(tuple(counts), True, parts_tried)


def width_attributes(owner: nn.Module, width: int, counts: Sequence[str]) -> tuple[str, ...]:
    """Return attributes of a module that are equal to the width of all heads, beside `counts`."""
    return tuple(
        key
        for key in EMBEDDING_WIDTHS
        if key not in counts and type(getattr(owner, key, None)) is int
        if getattr(owner, key) == width
    )
