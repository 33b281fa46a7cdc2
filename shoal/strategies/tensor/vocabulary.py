"""The first and the last layer of a language model in slices of the vocabulary.

embedding   each rank looks up its words, gives zeros for others', and the sum over ranks is whole
head        each rank gives the logits of its words, and nobody needs all of them: see `logits.py`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import reduce_from_region
from shoal.platform.torch_private.kernels import assert_async
from shoal.strategies.tensor.column_input import reduce_scatter_sequence, to_column_input
from shoal.strategies.tensor.logits import VocabParallelLogits
from shoal.strategies.tensor.region import local_shard


class VocabParallelEmbedding(nn.Embedding):
    """Looks up this rank's words; the sum over ranks is whole, or lies in slices of the
    sequence.
    """

    axis: Axis
    shard_dim: int | None

    def forward(self, input: Tensor) -> Tensor:
        words = self.num_embeddings // self.axis.size
        first = self.axis.rank * words
        known = (input >= 0) & (input < self.num_embeddings)
        assert_async(
            known.all(), f"index out of range in an embedding of {self.num_embeddings} rows"
        )
        ours = (input >= first) & (input < first + words)
        rows = torch.where(ours, input - first, 0)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < words else None
        found = F.embedding(rows, local_shard(self.weight), padding)
        ours_alone = found.masked_fill(~ours.unsqueeze(-1), 0.0)
        if self.shard_dim is None or found.dim() < 3:
            return reduce_from_region(ours_alone, self.axis)
        return reduce_scatter_sequence(ours_alone, self.axis, self.shard_dim)


class VocabParallelHead(nn.Linear):
    """Gives this rank's logits, as a tensor that becomes whole where all of them are looked at."""

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        return VocabParallelLogits.of(
            to_column_input(x, self.axis).linear(local_shard(self.weight), local_shard(self.bias)),
            self.axis,
        )
