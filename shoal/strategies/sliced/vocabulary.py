"""The first and the last layer of a language model in slices of the vocabulary.

embedding   each rank looks up its words, gives zeros for others', and the sum over ranks is whole
head        each rank gives the logits of its words, and nobody needs all of them: see `logits.py`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.exchange import total
from shoal.strategies.sliced.entered import enter, scattered
from shoal.strategies.sliced.logits import Logits
from shoal.strategies.sliced.region import here
from shoal.torch_private.kernels import assert_async


class VocabularyEmbedding(nn.Embedding):
    """Looks up this rank's words; the sum over ranks is whole, or lies in slices of the sequence."""

    axis: Axis
    along: int | None

    def forward(self, input: Tensor) -> Tensor:
        words = self.num_embeddings // self.axis.size
        first = self.axis.rank * words
        known = (input >= 0) & (input < self.num_embeddings)
        assert_async(known.all(), f"index out of range in an embedding of {self.num_embeddings} rows")
        ours = (input >= first) & (input < first + words)
        rows = torch.where(ours, input - first, 0)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < words else None
        found = F.embedding(rows, here(self.weight), padding)
        ours_alone = found.masked_fill(~ours.unsqueeze(-1), 0.0)
        if self.along is None or found.dim() < 3:
            return total(ours_alone, self.axis)
        return scattered(ours_alone, self.axis, self.along)


class VocabularyHead(nn.Linear):
    """Gives this rank's logits, as a tensor that becomes whole where all of them are looked at."""

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        return Logits.of(enter(x, self.axis).linear(here(self.weight), here(self.bias)), self.axis)
