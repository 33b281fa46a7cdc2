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
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, None, self.dropout if self.training else 0, True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(b, t, c)
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
        _, t = idx.size()
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
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
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


class Learner(nn.Module):
    """A network that it and its encoder hold, as that of byol-pytorch, and a test of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.online = nn.Sequential(self.net, nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        assert float(x.detach().abs().sum()) > 0
        scores: Tensor = self.online(x)
        return scores


class MadeInForward(nn.Module):
    """A layer with weights is made on the way: nobody can divide what lies around it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 8)
        self.last = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.Linear(12, 12)(self.one(x))
        scores: Tensor = self.last(self.two(x))
        return scores


class Words(nn.Module):
    """Words and positions, blocks of attention with hidden units, and a head."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(ShortBlock(attention()) for _ in range(2)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.shape
        x = self.words(idx) + self.positions(torch.arange(t, device=idx.device))
        logits: Tensor = self.head(self.blocks(x))
        return logits


class ShortBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln1, self.ln2, self.sa = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention
        self.ffwd = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class NamedAttention(nn.Module):
    """Key, query and value by their names; counts its own forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj, self.attn_drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.n_head, self.passes = HEADS, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        b, t, c = x.shape
        k, q, v = (
            layer(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for layer in (self.key, self.query, self.value)
        )
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        att = (q @ k.mT / math.sqrt(c // self.n_head)).masked_fill(later, -torch.inf)
        y = self.attn_drop(att.softmax(-1)) @ v
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, t, c))
        return out


def turned(x: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the position."""
    angle = torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1, 1)
    one, two = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


class TurnedAttention(nn.Module):
    """Four heads of queries, two of keys and values, in the names of Llama's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = 4, 2, 2, WIDTH // 4
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        q = turned(self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim))
        k = turned(self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim))
        v = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        k, v = (
            part[:, :, :, None]
            .expand(bsz, seqlen, self.n_kv_heads, self.n_rep, self.head_dim)
            .reshape(bsz, seqlen, self.n_heads, self.head_dim)
            for part in (k, v)
        )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).contiguous().view(bsz, seqlen, -1))
        return out


class InterleavedAttention(nn.Module):
    """One matrix, in which each head's query, key and value follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_attention_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.query_key_value(x).view(b, t, self.num_attention_heads, -1)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.dense(y.transpose(1, 2).flatten(2))
        return out


class LecturesGPT(Words):
    def __init__(self) -> None:
        super().__init__(NamedAttention)


class TurnedGPT(Words):
    def __init__(self) -> None:
        super().__init__(TurnedAttention)


class InterleavedGPT(Words):
    def __init__(self) -> None:
        super().__init__(InterleavedAttention)
