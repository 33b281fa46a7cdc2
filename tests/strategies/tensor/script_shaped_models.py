"""Small models in the shapes that training scripts give them; ranks import them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LENGTH = 18, 8, 2, 13


class FusedAttention(nn.Module):
    """One matrix for query, key and value; a mask as a buffer, or torch's own attention."""

    def __init__(self, dropout: float, with_mask: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, dropout
        self.flash = not with_mask
        if with_mask:
            mask = torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH)
            self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, None, self.dropout if self.training else 0, True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    """Attention and hidden units, as a module or in the dict of an older script."""

    def __init__(self, dropout: float, old: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = FusedAttention(dropout, with_mask=old)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(WIDTH, 4 * WIDTH),
                "c_proj": nn.Linear(4 * WIDTH, WIDTH),
                "act": nn.GELU(),
                "dropout": nn.Dropout(dropout),
            }
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class ScriptGPT(nn.Module):
    """Gives logits and, with targets, the loss; checks the length; logits of the last word only."""

    def __init__(self, dropout: float = 0.0, old: bool = False) -> None:
        super().__init__()
        self.block_size, self.old = LENGTH, old
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(dropout, old) for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if not old:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device = idx.device
        b, t = idx.size()
        assert t <= self.block_size, f"{t} words are more than {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        parts = self.transformer
        x = parts.drop(parts.wte(idx) + parts.wpe(pos))
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        if targets is None and not self.old:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )
        return logits, loss


class SlicedSequential(nn.Module):
    """Slices of a Sequential, a module made on the way, and a count of its own forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)
        )
        self.calls, self.seen = 0, list[Tensor]()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.passes += 1
        self.seen.append(x)
        scores: Tensor = self.net[3:](nn.Tanh()(self.net[:3](x)))
        return scores
