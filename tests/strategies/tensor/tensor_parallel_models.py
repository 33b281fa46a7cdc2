"""Models that tensor parallelism divides, with their losses; ranks import them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models import build
from shoal.verification import Experiment
from tests.matrix.cases import (
    EXPERIMENTS,
    image_loader,
    mean_over_tokens,
    token_loader,
)

WORDS = 18  # the zoo's tokens are of 17, which 2 does not divide


def mlp() -> nn.Module:
    return build("mlp", 10, (1, 8, 8), {"hidden": (12, 16, 6)})


def gpt(tied: bool = True) -> nn.Module:
    return build("gpt", WORDS, (13,), {"width": 8, "layers": 2, "heads": 2, "tied": tied})


def gpt_untied() -> nn.Module:
    return gpt(tied=False)


def vit() -> nn.Module:
    small = {"num_heads": 2, "embed_dim": 16, "depth": 1, "img_size": 8, "patch_size": 4}
    return build("timm:vit_tiny_patch16_224", 10, (1, 8, 8), small)


def resnet() -> nn.Module:
    return build("cifar_resnet18", 10, (1, 8, 8), {})


def gpt_dropping() -> nn.Module:
    return build("gpt", WORDS, (13,), {"width": 8, "layers": 1, "heads": 2, "dropout": 0.2})


class Encoder(nn.Module):
    """torch's transformer layers, with dropout in every place."""

    def __init__(self, norm_first: bool = False, dropout: float = 0.3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout, batch_first=True, norm_first=norm_first
        )
        self.embed, self.head = nn.Embedding(WORDS, 8, padding_idx=3), nn.Linear(8, WORDS)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(
            self.layers(self.embed(x), mask=nn.Transformer.generate_square_subsequent_mask(13))
        )
        return logits


class Decoder(nn.Module):
    """Attention to another sequence, to a mask of its own, time first; weights are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, norm_first=True)
        self.seen = nn.MultiheadAttention(8, 4, bias=False)
        self.head = nn.Linear(8, 17)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.embed(x).transpose(0, 1)
        hidden = self.layer(memory.flip(0), memory, memory_key_padding_mask=x == 3)
        more, weights = self.seen(hidden, memory, memory)
        logits: Tensor = self.head(hidden + more * weights.sum(2).T.unsqueeze(2)).transpose(0, 1)
        return logits


class Gated(nn.Module):
    """SwiGLU as in Llama, and a depthwise convolution in a pair as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.each = (
            nn.Conv2d(1, 8, 1),
            nn.Conv2d(8, 8, 3, groups=8, padding=1, bias=False),
        )
        self.norm, self.project = nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1)
        self.gate, self.up, self.down = (
            nn.Linear(192, 12, bias=False),
            nn.Linear(192, 12),
            nn.Linear(12, 10),
        )

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.project(F.relu6(self.norm(self.each(self.expand(x))))).flatten(1)
        scores: Tensor = self.down(F.silu(self.gate(x)) * self.up(x) * 2.0) * scale
        return scores


class Apart(nn.Module):
    """Layers that look like pairs and are none, each for another reason; and one pair."""

    def __init__(self) -> None:
        super().__init__()
        # The output of `seen` is used outside of the pair.
        self.seen, self.taken = nn.Linear(64, 12), nn.Linear(12, 12)
        self.normed, self.norm, self.after = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12)
        self.twice, self.read, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)
        self.one, self.two = nn.Linear(10, 8), nn.Linear(8, 10)  # a pair

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.seen(x.flatten(1))
        x = self.taken(hidden).relu() + hidden
        x = self.after(self.norm(self.normed(x)).relu())
        x = self.twice(self.twice(x).relu())
        x = self.last(self.read(x).relu()) + self.read.weight.sum()
        scores: Tensor = self.two(torch.tanh(self.one(x)))
        return scores


class Core(nn.Module):
    """The part of attention that is worth recomputing: no parameters, many activations."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = F.dropout((query @ key.transpose(-2, -1)).softmax(-1), 0.3, self.training)
        return (weights @ value).transpose(1, 2).flatten(-2)


class Selective(nn.Module):
    """Attention with its dropout in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(8, 8) for _ in range(4))
        self.head_width, self.core = 4, Core()

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        found: Tensor = self.output(
            self.core(*(layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in layers))
        )
        return found


class Rows(nn.Module):
    """Attention between the rows of an image, then layers in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Selective()
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 10)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x.squeeze(1)).mean(1)
        scores: Tensor = self.layers[1](self.layers[0](x).relu())
        return scores


CUT = {
    "mlp": Experiment(mlp, image_loader, F.cross_entropy),
    "gpt": Experiment(gpt, token_loader, mean_over_tokens),
    "gpt, untied": Experiment(gpt_untied, token_loader, mean_over_tokens),
    "gpt with dropout": Experiment(gpt_dropping, token_loader, mean_over_tokens),
    "transformer encoder with dropout": Experiment(Encoder, token_loader, mean_over_tokens),
    "transformer decoder": Experiment(Decoder, token_loader, mean_over_tokens),
    "cnn": EXPERIMENTS["cnn"],
    "cnn with BatchNorm": EXPERIMENTS["cnn with BatchNorm"],
    "gated": Experiment(Gated, image_loader, F.cross_entropy),
    "rows": Experiment(Rows, image_loader, F.cross_entropy),
    "apart": Experiment(Apart, image_loader, F.cross_entropy),
    "dropout": EXPERIMENTS["dropout"],
    "vit": Experiment(vit, image_loader, F.cross_entropy, steps=2),
    "resnet": Experiment(resnet, image_loader, F.cross_entropy, steps=2),
}
