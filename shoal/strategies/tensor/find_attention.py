"""Find attention by the names of its layers.

          x ──> query ─┐
           ├──> key   ─┼── heads of this rank ──> output ──> sum over ranks
           └──> value ─┘

Query, key and value become column parallel, the output row parallel, so that each head is on one
rank. The names say which layers these are; the code between them is not examined. So the first
forward pass is compared with that of the full model: see `heads.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shoal.strategies.tensor.candidates import (
    Candidates,
    find_hooks_inside,
    width_in,
    width_out,
)

ATTENTION_LAYERS = (
    (("query", "key", "value"), "output"),  # shoal.models
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama, Mistral, Qwen, Gemma
    (("q_proj", "k_proj", "v_proj"), "out_proj"),  # OPT, BART, CLIP, Whisper, GPT-J
    (("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    (("self.query", "self.key", "self.value"), "output.dense"),  # BERT, RoBERTa, ELECTRA
    # ViT of Hugging Face:
    (("attention.query", "attention.key", "attention.value"), "output.dense"),
    (("q", "k", "v"), "o"),  # T5
    (("to_q", "to_k", "to_v"), "to_out"),
    (("qkv",), "proj"),  # timm, Swin
    (("c_attn",), "c_proj"),  # GPT-2, nanoGPT
    (("query_key_value",), "dense"),  # GPT-NeoX
    (("query", "key", "value"), "proj"),  # minGPT as it was
    (("q", "k", "v"), "proj"),
    (("wq", "wk", "wv"), "wo"),  # Llama as Meta wrote it
    (("w_q", "w_k", "w_v"), "w_o"),
    (("W_q", "W_k", "W_v"), "W_o"),
    (("W_query", "W_key", "W_value"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "c_proj"),
    (("linears.0", "linears.1", "linears.2"), "linears.3"),  # the annotated transformer
    (("to_q", "to_k", "to_v"), "to_out.0"),
    (("to_qkv",), "to_out"),
    (("to_qkv",), "to_out.0"),
    (("qkv_proj",), "o_proj"),
    (("qkv",), "out_proj"),
)
"""Names of column layers and of the row layer inside an attention module.

A single column layer holds query, key and value in one matrix.
"""

HEADS = (
    *("num_heads", "n_heads", "heads", "n_head", "num_attention_heads"),
    *("nhead", "num_head", "nheads", "h", "n_local_heads"),
)
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
WIDTHS = ("attn_dim", "all_head_size", "inner_dim", "split_size")
HEAD_WIDTHS = (
    *("head_dim", "head_width", "attention_head_size", "key_value_proj_dim", "head_size"),
    *("d_k", "d_head", "dim_head"),
)
BIAS_OF_HEADS = "position_bias"
"""Argument of T5's attention: its first layer makes this bias and passes it to all others."""


@dataclass(frozen=True)
class AttentionPlan:
    """Attention that is divided between heads.

    Args:
        name: name of the module whose forward pass is compared with that of the full model.
        columns: names of the column parallel layers.
        row: name of the row parallel layer.
        owner: name of the module with the attributes `counts`.
        counts: attributes that are 1/T on a rank: numbers of heads, the width of all heads.
        fused: matrices in each column layer: 3 where it holds query, key and value.
    """

    name: str
    columns: tuple[str, ...]
    row: str
    owner: str
    counts: tuple[str, ...]
    fused: int


def find_attention(model: nn.Module, candidates: Candidates) -> Iterator[AttentionPlan]:
    """Yield attention that can be divided; reasons against others go to `candidates.reasons`."""
    for name, module in model.named_modules():
        for columns, row in ATTENTION_LAYERS:
            plan = _plan_attention(name, module, columns, row, candidates)
            if plan is not None:
                yield plan
                break


def _plan_attention(
    name: str, module: nn.Module, columns: tuple[str, ...], row: str, candidates: Candidates
) -> AttentionPlan | None:
    """Plan `module` as attention, if it has layers of these names and can be divided."""
    inner = dict(module.named_modules())
    paths = (*columns, row)
    if not all(path in inner and candidates.may_shard(inner[path], (nn.Linear,)) for path in paths):
        return None
    layers = [inner[path] for path in paths]
    hooked = find_hooks_inside(module)
    if hooked is not None:
        candidates.reasons[name] = f"hooks of its {hooked} would see a slice of what goes by"
        return None

    # BERT's attention has its numbers of heads in the module `self`, which owns the columns.
    owner_path = columns[0].rpartition(".")[0]
    owner = inner[owner_path]
    width = width_in(layers[-1])
    heads = _int_attribute(owner, HEADS)
    head_width = _int_attribute(owner, HEAD_WIDTHS) or (width // heads if heads else None)
    if head_width is None or "forward" in vars(module):
        return None
    if module not in candidates.remaining:
        full_model = candidates.full_model
        if full_model is not None and not full_model.runs_whole(name):
            candidates.reasons[name] = (
                "its forward function does not run as a whole: the pipeline has looked into it"
            )
        return None

    fused = 3 if len(columns) == 1 else 1
    column_widths = [width_out(layer) // fused for layer in layers[:-1]]
    reason = _reason_against_heads(module, owner, layers) or _reason_against_degree(
        owner, width, column_widths, head_width, candidates.degree
    )
    if reason:
        candidates.reasons[name] = reason
        return None
    prefix = f"{name}." if name else ""
    return AttentionPlan(
        name,
        columns=tuple(prefix + column for column in columns),
        row=prefix + row,
        owner=(prefix + owner_path).rstrip("."),
        counts=head_count_attributes(owner, width),
        fused=fused,
    )


def _reason_against_heads(module: nn.Module, owner: nn.Module, layers: list[nn.Module]) -> str:
    """Return why heads cannot be divided by these layers alone; empty if they can."""
    divided = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in owner.named_parameters():
        if id(parameter) not in divided:
            # It would be replicated, but its gradient on a rank is that of this rank's heads only.
            return f"it has parameters of its own, {name}, that each head may use"
    if BIAS_OF_HEADS in inspect.signature(module.forward).parameters:
        return f"it is handed {BIAS_OF_HEADS}, which has a part for each head"
    return ""


def _reason_against_degree(
    owner: nn.Module, width: int, column_widths: list[int], head_width: int, degree: int
) -> str:
    """Return why heads cannot be divided into `degree` equal shares; empty if they can.

    Args:
        width: width of all heads together, the input of the row layer.
        column_widths: width of all heads together, for each column layer.
    """
    heads = _int_attribute(owner, HEADS) or width // head_width
    is_even = all(each % (head_width * degree) == 0 for each in column_widths)
    if column_widths[0] == width and is_even and heads * head_width == width:
        return ""
    return f"{width // head_width} heads are no multiple of {degree}"


def head_count_attributes(owner: nn.Module, width: int) -> tuple[str, ...]:
    """Return the module's attributes that are 1/T on a rank.

    These are numbers of heads, and attributes that equal `width`, the width of all heads.
    """
    counts = [key for key in (*HEADS, *KEY_HEADS) if isinstance(getattr(owner, key, None), int)]
    widths = [key for key in WIDTHS if getattr(owner, key, None) == width]
    return (*counts, *widths)


def _int_attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that is an int, None if none is."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return None
