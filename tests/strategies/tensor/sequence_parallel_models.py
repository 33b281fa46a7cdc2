"""Models with sequence parallel activations, with their losses; ranks import them."""

import torch
import torch.nn.functional as F
from tensor_parallel_models import CUT, WORDS, Encoder, Selective
from torch import Tensor, nn

from shoal.models import build
from shoal.verification import Experiment
from tests.matrix.cases import mean_over_tokens, token_loader


class TimeFirst(nn.Module):
    """torch's transformer layers on (time, batch, width), with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embed(x).transpose(0, 1))).transpose(0, 1)
        return logits


class Between(nn.Module):
    """Operations between blocks: some compute each token by itself, others use several tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, 8), nn.Parameter(torch.randn(1, 13, 8))
        self.first, self.second, self.scale = Selective(), Selective(), nn.Parameter(torch.ones(8))
        self.norm, self.over_tokens = nn.RMSNorm(8), nn.LayerNorm([13, 8])
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 8**0.5 + self.positions
        x = x + self.scale * self.first(self.norm(x))
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2) * x.mean(1, keepdim=True)
        x = x + self.down(F.silu(self.up(self.over_tokens(x)))) * (x[:, :1] + 1)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
        x += self.second(x / 2 - 1)
        logits: Tensor = self.head(torch.cat([x[:, :6], x.flip(1)[:, 6:]], 1))
        return logits


def gpt_of_four_heads() -> nn.Module:
    return build("gpt", 20, (13,), {"width": 8, "layers": 1, "heads": 4, "dropout": 0.2})


def norm_first() -> nn.Module:
    return Encoder(norm_first=True)


class Short(nn.Module):
    """A layer of one token, of which some ranks have none; its output is added to all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, 0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        logits: Tensor = self.head(embedded + self.layer(embedded[:, :1].clone()))
        return logits


def between_without_dropout() -> nn.Module:
    model = Between()
    model.first.core.eval()
    model.second.core.eval()
    return model


IN_SLICES = {
    "gpt": CUT["gpt"],
    "gpt, untied": CUT["gpt, untied"],
    "gpt with dropout": CUT["gpt with dropout"],
    "gpt of four heads": Experiment(gpt_of_four_heads, token_loader, mean_over_tokens),
    "norm last, with dropout": CUT["transformer encoder with dropout"],
    "norm first, with dropout": Experiment(norm_first, token_loader, mean_over_tokens),
    "time first": Experiment(TimeFirst, token_loader, mean_over_tokens),
    "decoder": CUT["transformer decoder"],
    "between": Experiment(Between, token_loader, mean_over_tokens),
    "between, without dropout": Experiment(between_without_dropout, token_loader, mean_over_tokens),
    "one token": Experiment(Short, token_loader, mean_over_tokens),
    "vit": CUT["vit"],
    "rows": CUT["rows"],
}
