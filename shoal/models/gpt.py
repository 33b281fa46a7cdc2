"""A decoder-only transformer of any size, with a norm before each branch.

Shape suffixes: B batch, T time, D width, H heads, K width of a head, V vocabulary.

Sources: Vaswani et al., NeurIPS 2017; Radford et al., "Language models are unsupervised multitask
learners", 2019 (norms first, learned positions, the scale of the initial weights); Press & Wolf,
EACL 2017 (the tied head)."""
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.model_options import no_sequence, refuse

INITIAL_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention. Query, key and value are separate modules, so that tensor parallelism
    can divide each of them by heads.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        query_BHTK, key_BHTK, value_BHTK = (
            # -1: a tensor parallel rank has only some of the heads.
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        x_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHTK, value_BHTK, dropout_p=dropout, is_causal=True
        )
        update_BTD: Tensor = self.output(x_BHTK.transpose(1, 2).flatten(-2))
        return update_BTD


class FeedForward(nn.Module):
    """Linear to four times the width, GELU, linear back; each position by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        update_BTD: Tensor = self.down(F.gelu(self.up(x_BTD)))
        return update_BTD


class Block(nn.Module):
    """Attention, then feed-forward. Each reads the normalised stream and adds to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        x_BTD = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return x_BTD


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks, a last norm, a linear head.

    Args:
        num_classes: size of the vocabulary.
        input_shape: (time,), the longest sequence that the model takes.
        layers: number of blocks.
        width: of the stream between blocks; a multiple of heads.
        heads: of each attention.
        dropout: share set to zero of the embeddings, of the attention's weights and of each
            branch's output.
        tied: head and token embedding are one matrix.

    Raises:
        ConfigError: samples that are no sequences, values out of range, or a width that heads do
            not divide.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        input_shape: tuple[int, ...],
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        _check(input_shape, layers, width, heads, dropout)
        self.token_embedding = nn.Embedding(num_classes, width)
        self.position_embedding = nn.Embedding(input_shape[0], width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight
        self._initialise()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Compute the logits of each next token: int64 (batch, time) -> (batch, time,
        vocabulary).
        """
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def _initialise(self) -> None:
        # Each block adds to the stream twice. With this scale the variance of the stream does not
        # grow with the depth.
        branch_std = INITIAL_STD / (2 * len(self.blocks)) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = branch_std if name.endswith(("attention.output", "mlp.down")) else INITIAL_STD
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def _check(
    input_shape: tuple[int, ...], layers: int, width: int, heads: int, dropout: float
) -> None:
    refuse(
        no_sequence("gpt", input_shape),
        (layers < 1, f"options.layers: {layers}; must be 1 or more"),
        (heads < 1, f"options.heads: {heads}; must be 1 or more"),
        (
            heads > 0 and width % heads != 0,
            f"options.width: {width}; must be a multiple of heads={heads}",
        ),
        (width < 1, f"options.width: {width}; must be 1 or more"),
        (not 0 <= dropout < 1, f"options.dropout: {dropout}; must be in [0, 1)"),
    )
