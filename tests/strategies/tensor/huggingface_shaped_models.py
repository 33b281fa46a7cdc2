"""Small language models with the names and shapes that Hugging Face's library gives their
parts; ranks import them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.verification import Experiment
from tests.matrix.cases import mean_over_tokens, token_loader

WORDS, WIDTH = 18, 8


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = (
            nn.Parameter(torch.randn(nx, nf) * 0.3),
            nn.Parameter(torch.zeros(nf)),
        )

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


def heads(x: Tensor, width: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, width).transpose(1, 2)


class GPT2Attention(nn.Module):
    """One matrix for query, key and value, and a cache that a forward pass writes into."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size, self.dropout = 2, WIDTH // 2, WIDTH, dropout
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        query, key, value = (
            heads(part, self.head_dim) for part in self.c_attn(x).split(self.split_size, dim=2)
        )
        cache.append(key)
        assert len(cache) == 1
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.c_proj(found.transpose(1, 2).flatten(-2).contiguous())


class NewGELU(nn.Module):
    """With tanh, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class GPT2MLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.act = Conv1D(12, WIDTH), Conv1D(WIDTH, 12), NewGELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPT2Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = GPT2Attention(dropout), GPT2MLP(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.ln_1(x), []) + x
        return x + self.mlp(self.ln_2(x))


class RMSNorm(nn.Module):
    """Written out, as in Llama, T5 and others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaAttention(nn.Module):
    """Four heads of queries and two of keys and values; positions are turned in."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = 2, 2
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        query, key, value = (
            heads(layer(x), self.head_dim) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = query * turn + query.flip(-1), key * turn + key.flip(-1)
        key, value = (
            part.repeat_interleave(self.num_key_value_groups, dim=1) for part in (key, value)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(found.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(12, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.arange(x.shape[1], dtype=x.dtype).cos().view(1, 1, -1, 1)
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class BertSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = (
            2,
            WIDTH // 2,
            WIDTH,
        )
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            heads(layer(x), self.attention_head_size)
            for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(*parts).permute(0, 2, 1, 3).contiguous()
        return found.view(*found.size()[:-2], self.all_head_size)


class BertOutput(nn.Module):
    """Dense, dropout, and a norm of the sum."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = (
            nn.Linear(width, WIDTH),
            nn.Dropout(0.3),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + before)


class BertAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = BertSelfAttention(), BertOutput()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x), x)


class BertIntermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = (
            BertAttention(),
            BertIntermediate(),
            BertOutput(12),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class T5Attention(nn.Module):
    """Takes a bias of the scores that its caller made for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.key_value_proj_dim, self.inner_dim = 2, WIDTH // 2, WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, position_bias: Tensor) -> Tensor:
        query, key, value = (
            heads(layer(x), self.key_value_proj_dim) for layer in (self.q, self.k, self.v)
        )
        weights = (query @ key.transpose(-1, -2) + position_bias).softmax(-1)
        return self.o((weights @ value).transpose(1, 2).reshape(*x.shape[:-1], self.inner_dim))


class T5DenseActDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo, self.act = (
            nn.Linear(WIDTH, 12, bias=False),
            nn.Linear(12, WIDTH, bias=False),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.dropout(self.act(self.wi(x))))


class T5Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.SelfAttention, self.DenseReluDense = T5Attention(), T5DenseActDense()
        self.relative_attention_bias, self.layer_norm = nn.Embedding(13, 2), RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.relative_attention_bias((places - places.unsqueeze(1)).abs()).permute(2, 0, 1)
        x = x + self.SelfAttention(self.layer_norm(x), position_bias=bias)
        return x + self.DenseReluDense(x)


class OPTAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, WIDTH // 2
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        query, key, value = (
            heads(layer(x), self.head_dim) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = F.scaled_dot_product_attention(
            query * self.head_dim**-0.5, key, value, is_causal=True, scale=1.0
        )
        return self.out_proj(found.transpose(1, 2).flatten(-2)), None


class OPTDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = OPTAttention(), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2, self.final_layer_norm = (
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        added, _ = self.self_attn(self.self_attn_layer_norm(x))
        x = x + F.dropout(added, 0.2, self.training)
        return x + F.dropout(
            self.fc2(F.relu(self.fc1(self.final_layer_norm(x)))), 0.2, self.training
        )


class Language(nn.Module):
    """Words, positions, blocks, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe, self.h = (
            nn.Embedding(WORDS, WIDTH),
            nn.Embedding(13, WIDTH),
            nn.ModuleList(blocks),
        )
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def gpt2() -> nn.Module:
    return Language(GPT2Block(0.0), GPT2Block(0.2))


def gpt2_without_dropout() -> nn.Module:
    return Language(GPT2Block(0.0))


def llama() -> nn.Module:
    return Language(LlamaDecoderLayer(), LlamaDecoderLayer())


def bert() -> nn.Module:
    return Language(BertLayer(), BertLayer())


def t5() -> nn.Module:
    return Language(T5Block(), T5Block())


def opt() -> nn.Module:
    return Language(OPTDecoderLayer(), OPTDecoderLayer())


NAMED = {
    make.__name__: Experiment(make, token_loader, mean_over_tokens)
    for make in (gpt2, llama, bert, t5, opt)
}
