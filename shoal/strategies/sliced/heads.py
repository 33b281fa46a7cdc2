"""Attention in slices of heads: query, key and value as columns, the output as row, each head on one rank.

          x ──> query ─┐
           ├──> key   ─┼── heads of this rank ──> output ──> total
           └──> value ─┘

Which modules these are is known by their names: what their own forward pass does with them is not looked into. So the
first forward pass does both, it computes the whole on every rank and compares; that costs one forward pass, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.norm import whole
from shoal.errors import StrategyRefused
from shoal.strategies.sliced.beside import copied
from shoal.strategies.sliced.draws import WholeDraws
from shoal.strategies.sliced.pairs import Modules, width_in, width_out
from shoal.strategies.sliced.region import Region

NAMES = (
    (("query", "key", "value"), "output"),  # ours
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama, Mistral, Qwen, Gemma
    (("q_proj", "k_proj", "v_proj"), "out_proj"),  # OPT, BART, CLIP, Whisper, GPT-J
    (("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    (("self.query", "self.key", "self.value"), "output.dense"),  # BERT, RoBERTa, ELECTRA
    (("attention.query", "attention.key", "attention.value"), "output.dense"),  # ViT of Hugging Face
    (("q", "k", "v"), "o"),  # T5
    (("to_q", "to_k", "to_v"), "to_out"),
    (("qkv",), "proj"),  # timm, Swin
    (("c_attn",), "c_proj"),  # GPT-2, nanoGPT
)
"""Names of column layers and of the row layer, inside a module of attention; one column holds all three."""
HEADS = ("num_heads", "n_heads", "heads", "n_head", "num_attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("attn_dim", "all_head_size", "inner_dim", "split_size")
HEAD_WIDTHS = ("head_dim", "head_width", "attention_head_size", "key_value_proj_dim", "head_size")
BIAS_OF_HEADS = "position_bias"
"""T5 makes it in its first layer, and hands it on to all others."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative; anything less exact is given 0.1. A wrong cut is wrong in the first digit."""


@dataclass(frozen=True)
class Heads:
    """Attention that can be cut.

    Args:
        columns, row: names of modules.
        owner: name of the module that has `counts`.
        counts: its attributes that a rank has 1/T of, numbers of heads and widths of all heads together.
        fused: parts in each column: 3 where it holds query, key and value.
    """

    name: str
    columns: tuple[str, ...]
    row: str
    owner: str
    counts: tuple[str, ...]
    fused: int


def attentions(model: nn.Module, modules: Modules) -> Iterator[Heads]:
    """All that can be cut; why others cannot is put into `modules.reasons`."""
    for name, module in model.named_modules():
        for columns, row in NAMES:
            found = _heads(name, module, columns, row, modules)
            if found is not None:
                yield found
                break


def _heads(name: str, module: nn.Module, columns: tuple[str, ...], row: str, modules: Modules) -> Heads | None:
    below = dict(module.named_modules())
    layers = [below.get(path) for path in (*columns, row)]
    if not all(layer is not None and modules.may_be_cut(layer, (nn.Linear,)) for layer in layers):
        return None
    path, _, _ = columns[0].rpartition(".")
    owner, fused = below[path], 3 if len(columns) == 1 else 1
    width, head_width, heads = width_in(layers[-1]), _number(owner, HEAD_WIDTHS), _number(owner, HEADS)
    head_width = head_width or (width // heads if heads else None)
    if head_width is None or "forward" in vars(module):
        return None
    if module not in modules.left:
        if modules.uncut is not None and not modules.uncut.running(name):
            modules.reasons[name] = "its forward function does not run as a whole: the pipeline has looked into it"
        return None
    cut = {id(p) for layer in layers for p in layer.parameters()}  # type: ignore[union-attr]
    if strangers := [n for n, p in owner.named_parameters() if id(p) not in cut]:
        # On a slice of the heads its gradient would be that of a slice.
        modules.reasons[name] = f"it has parameters of its own, {strangers[0]}, that each head may use"
        return None
    if BIAS_OF_HEADS in inspect.signature(module.forward).parameters:
        modules.reasons[name] = f"it is handed {BIAS_OF_HEADS}, which has a part for each head"
        return None
    widths = [width_out(layer) // fused for layer in layers[:-1]]
    uneven = [w for w in widths if w % (head_width * modules.degree)]
    if widths[0] != width or uneven or (heads or width // head_width) * head_width != width:
        modules.reasons[name] = f"{width // head_width} heads are no multiple of {modules.degree}"
        return None
    prefix = f"{name}." if name else ""
    names, owner_name = tuple(prefix + c for c in columns), (prefix + path).rstrip(".")
    return Heads(name, names, prefix + row, owner_name, counts_of(owner, width), fused)


def counts_of(owner: nn.Module, width: int) -> tuple[str, ...]:
    """Attributes of a module of which a rank has 1/T: numbers of heads, and the width of all of them."""
    heads = [key for key in (*HEADS, *KEY_HEADS) if isinstance(getattr(owner, key, None), int)]
    return (*heads, *(key for key in WIDTHS if getattr(owner, key, None) == width))


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = [value for key in names if isinstance(value := getattr(module, key, None), int)]
    return found[0] if found else None


class HeadsRegion(Region):
    """A region whose first forward pass is compared with that of the whole.

    Args: layers: the cut ones. counted: (module, attribute): what a rank has 1/T of.
    """

    def __init__(
        self, module: nn.Module, name: str, axis: Axis, layers: list[Any], counted: list[tuple[nn.Module, str]]
    ) -> None:
        super().__init__(module, name, axis)
        self.layers, self.counted, self.compared = layers, counted, False

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.compared:
            return self._sliced(*inputs, **options)
        self.compared = True
        others, other_options = copied((inputs, options))
        expected = self._whole(*others, **other_options)
        try:
            found = self._sliced(*inputs, **options)
        except RuntimeError as error:
            raise StrategyRefused(f"{self._head()}its forward pass fails: {error}. {self._cure()}") from error
        self._compare(found, expected)
        return found

    def _sliced(self, *inputs: Any, **options: Any) -> Any:
        with WholeDraws(self.axis) if self.module.training else nullcontext():
            return super().__call__(*inputs, **options)

    def _whole(self, *inputs: Any, **options: Any) -> Any:
        kinds, own = [type(layer) for layer in self.layers], [dict(layer._parameters) for layer in self.layers]
        device = self.axis.device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for layer in self.layers:
                layer.__class__ = layer.sliced_from
                for key, parameter in layer._parameters.items():
                    layer._parameters[key] = None if parameter is None else nn.Parameter(whole(parameter), False)
            self._count(self.axis.size, 1)
            try:
                return type(self.module).forward(self.module, *inputs, **options)
            finally:
                self._count(1, self.axis.size)
                for layer, kind, parameters in zip(self.layers, kinds, own, strict=True):
                    layer.__class__ = kind
                    layer._parameters.update(parameters)

    def _count(self, times: int, divided_by: int) -> None:
        for module, key in self.counted:
            setattr(module, key, getattr(module, key) * times // divided_by)

    def _compare(self, found: Any, expected: Any) -> None:
        found, expected = (value[0] if isinstance(value, tuple) else value for value in (found, expected))
        alike = isinstance(found, Tensor) and found.shape == expected.shape
        size = expected.abs().max().double() if alike else 0.0
        error = (found.detach() - expected).abs().max().double() / size if alike and size else torch.tensor(0.0)
        if not alike or not error <= TOLERANCES.get(found.dtype, 0.1):
            raise StrategyRefused(
                f"{self._head()}its output is not that of the whole (relative difference {float(error):.1e}). "
                f"{self._cure()}"
            )

    def _head(self) -> str:
        return f"{self.name or 'the model'}: with its layers in slices "

    def _cure(self) -> str:
        return (
            "It does more with them than their names, or the plan, tell. Keep it whole: "
            f"tensor={self.axis.size},whole={self.name or '...'}."
        )
