"""A language model of stacked LSTMs.

Shape suffixes: B batch, T time, D width, V vocabulary.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

from torch import Tensor, nn

from shoal.models.model_options import no_sequence, refuse


class LSTM(nn.Module):
    """Embedding, LSTM layers, linear head. The state starts as zero in every sequence.

    Args:
        num_classes: size of the vocabulary.
        input_shape: (time,); `forward` takes any length.
        width: of the embedding and of every layer's state.
        layers: number of stacked LSTMs.
        dropout: share of activations set to zero after the embedding and after every layer.
        tied: head and embedding are one matrix; the head has its own bias.

    Raises: ConfigError: samples that are no sequences, values out of range.
    Source: Hochreiter & Schmidhuber, Neural Computation 9(8), 1997; Press & Wolf, EACL 2017 (the
    tied head)."""

    def __init__(
        self,
        *,
        num_classes: int,
        input_shape: tuple[int, ...],
        width: int = 512,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        refuse(
            no_sequence("lstm", input_shape),
            (width < 1, f"options.width: {width}; must be 1 or more"),
            (layers < 1, f"options.layers: {layers}; must be 1 or more"),
            (not 0 <= dropout < 1, f"options.dropout: {dropout}; must be in [0, 1)"),
        )
        self.embedding = nn.Embedding(num_classes, width)
        self.dropout = nn.Dropout(dropout)
        # One module for each layer: a pipeline stage can begin between two modules.
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, num_classes)
        if tied:
            # With the embedding's usual deviation of 1, the first logits would be far too large.
            nn.init.normal_(self.embedding.weight, std=width**-0.5)
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Compute the logits of each next token: int64 (batch, time) -> (batch, time,
        vocabulary).
        """
        x_BTD = self.dropout(self.embedding(tokens_BT))
        for layer in self.layers:
            x_BTD, _ = layer(x_BTD)
            x_BTD = self.dropout(x_BTD)
        logits_BTV: Tensor = self.head(x_BTD)
        return logits_BTV
