"""Attention in slices of heads: query, key and value as columns, the output as row, each head on
one rank.

          x ──> query ─┐
           ├──> key   ─┼── heads of this rank ──> output ──> total
           └──> value ─┘

Which modules these are is known by their names: what their own forward pass does with them is not
looked into. So the first forward pass does both, it computes the whole on every rank and compares;
that costs one forward pass, once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import all_gather_dim
from shoal.comm.norm import full_tensor
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.module_state import own_parameters
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.strategies.tensor.copy_structure import copy_without_tensors
from shoal.strategies.tensor.dropout_rng import GlobalDropout
from shoal.strategies.tensor.hooks import hooked_inside
from shoal.strategies.tensor.lazy_gather import LazyGatherTensor
from shoal.strategies.tensor.pairs import Candidates, width_in, width_out
from shoal.strategies.tensor.region import Region

NAMES = (
    (("query", "key", "value"), "output"),  # ours
    (("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama, Mistral, Qwen, Gemma
    (("q_proj", "k_proj", "v_proj"), "out_proj"),  # OPT, BART, CLIP, Whisper, GPT-J
    (("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    (("self.query", "self.key", "self.value"), "output.dense"),  # BERT, RoBERTa, ELECTRA
    (
        ("attention.query", "attention.key", "attention.value"),
        "output.dense",
    ),  # ViT of Hugging Face
    (("q", "k", "v"), "o"),  # T5
    (("to_q", "to_k", "to_v"), "to_out"),
    (("qkv",), "proj"),  # timm, Swin
    (("c_attn",), "c_proj"),  # GPT-2, nanoGPT
)
"""Names of column layers and of the row layer, inside a module of attention; one column holds
all three.
"""
HEADS = ("num_heads", "n_heads", "heads", "n_head", "num_attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("attn_dim", "all_head_size", "inner_dim", "split_size")
HEAD_WIDTHS = ("head_dim", "head_width", "attention_head_size", "key_value_proj_dim", "head_size")
BIAS_OF_HEADS = "position_bias"
"""T5 makes it in its first layer, and hands it on to all others."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative; anything less exact is given 0.1. A wrong cut is wrong in the first digit."""


@dataclass(frozen=True)
class AttentionPlan:
    """Attention that can be cut.

    Args: columns, row: names of modules. owner: name of the module that has `counts`. counts: its
        attributes that a rank has 1/T of, numbers of heads and widths of all heads together. fused:
        parts in each column: 3 where it holds query, key and value.
    """

    name: str
    columns: tuple[str, ...]
    row: str
    owner: str
    counts: tuple[str, ...]
    fused: int


def find_attentions(model: nn.Module, modules: Candidates) -> Iterator[AttentionPlan]:
    """All that can be cut; why others cannot is put into `modules.reasons`."""
    for name, module in model.named_modules():
        for columns, row in NAMES:
            found = _heads(name, module, columns, row, modules)
            if found is not None:
                yield found
                break


def _heads(
    name: str, module: nn.Module, columns: tuple[str, ...], row: str, modules: Candidates
) -> AttentionPlan | None:
    """Describe `module` as attention, if it has layers of these names and can be cut."""
    below = dict(module.named_modules())
    if not all(
        path in below and modules.may_be_cut(below[path], (nn.Linear,)) for path in (*columns, row)
    ):
        return None
    layers = [below[path] for path in (*columns, row)]
    if (seen := hooked_inside(module)) is not None:
        modules.reasons[name] = f"hooks of its {seen} would see a slice of what goes by"
        return None
    path, _, _ = columns[0].rpartition(".")
    owner, width = below[path], width_in(layers[-1])
    head_width = _head_width(owner, width)
    if head_width is None or "forward" in vars(module):
        return None
    if module not in modules.left:
        _note_looked_into(name, modules)
        return None
    fused = 3 if len(columns) == 1 else 1
    widths = [width_out(layer) // fused for layer in layers[:-1]]
    reason = _own_part(module, owner, layers) or _uneven(
        owner, width, widths, head_width, modules.degree
    )
    if reason:
        modules.reasons[name] = reason
        return None
    prefix = f"{name}." if name else ""
    names, owner_name = tuple(prefix + c for c in columns), (prefix + path).rstrip(".")
    return AttentionPlan(name, names, prefix + row, owner_name, counts_of(owner, width), fused)


def _head_width(owner: nn.Module, width: int) -> int | None:
    """Width of one head, where the module tells it or the number of heads; else None.

    Args: width: of all heads together.
    """
    heads = _number(owner, HEADS)
    return _number(owner, HEAD_WIDTHS) or (width // heads if heads else None)


def _note_looked_into(name: str, modules: Candidates) -> None:
    if modules.uncut is not None and not modules.uncut.stages_running(name):
        modules.reasons[name] = (
            "its forward function does not run as a whole: the pipeline has looked into it"
        )


def _own_part(module: nn.Module, owner: nn.Module, layers: list[nn.Module]) -> str:
    """Reason not to cut heads by their layers alone; empty where there is none."""
    cut = {id(p) for layer in layers for p in layer.parameters()}
    if strangers := [n for n, p in owner.named_parameters() if id(p) not in cut]:
        # On a slice of the heads its gradient would be that of a slice.
        return f"it has parameters of its own, {strangers[0]}, that each head may use"
    if BIAS_OF_HEADS in inspect.signature(module.forward).parameters:
        return f"it is handed {BIAS_OF_HEADS}, which has a part for each head"
    return ""


def _uneven(owner: nn.Module, width: int, widths: list[int], head_width: int, degree: int) -> str:
    """Reason not to cut heads into `degree` equal shares; empty where there is none.

    Args:
        width: of all heads together, as the row layer takes it.
        widths: of all heads together, as each column layer gives it.
    """
    heads = _number(owner, HEADS) or width // head_width
    even = all(each % (head_width * degree) == 0 for each in widths)
    if widths[0] == width and even and heads * head_width == width:
        return ""
    return f"{width // head_width} heads are no multiple of {degree}"


def counts_of(owner: nn.Module, width: int) -> tuple[str, ...]:
    """Attributes of a module of which a rank has 1/T: numbers of heads, and the width of all of
    them.
    """
    heads = [key for key in (*HEADS, *KEY_HEADS) if isinstance(getattr(owner, key, None), int)]
    return (*heads, *(key for key in WIDTHS if getattr(owner, key, None) == width))


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = [value for key in names if isinstance(value := getattr(module, key, None), int)]
    return found[0] if found else None


class HeadShardedTensor(LazyGatherTensor):
    """A part of the output that each rank has for its heads, their weights say; whole where
    somebody looks at it.
    """


class HeadsRegion(Region):
    """A region whose first forward pass is compared with that of the whole, in training and in
    evaluation.

    Args: layers: the cut ones. counted: (module, attribute): what a rank has 1/T of.

    Attributes: outputs: what was found, by whether it trains: for each tensor of the output None,
        or the dimension of the heads that this rank has of it.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        axis: Axis,
        layers: list[Any],
        counted: list[tuple[nn.Module, str]],
    ) -> None:
        super().__init__(module, name, axis)
        self.layers, self.counted = layers, counted
        self.outputs: dict[bool, list[int | None]] = {}

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.depth:  # its forward pass calls itself
            return self._sliced(*inputs, **options)
        if self.module.training in self.outputs:
            return self._wrap_outputs(self._sliced(*inputs, **options))
        others, other_options = copy_without_tensors((inputs, options))
        expected = self._whole(*others, **other_options)
        try:
            found = self._sliced(*inputs, **options)
        except RuntimeError as error:
            raise StrategyRefused(
                f"{self._head()}its forward pass fails: {error}. {self._suggestion()}"
            ) from error
        self.outputs[self.module.training] = self._check_split(found, expected)
        return self._wrap_outputs(found)

    def _sliced(self, *inputs: Any, **options: Any) -> Any:
        # What it has handed on comes back: a cache of keys and values, say.
        inputs, options = tree_map_only(
            HeadShardedTensor, lambda x: x if x.written else x.local, (inputs, options)
        )
        with GlobalDropout(self.axis) if self.module.training else nullcontext():
            return super().__call__(*inputs, **options)

    def _whole(self, *inputs: Any, **options: Any) -> Any:
        kinds, own = (
            [type(layer) for layer in self.layers],
            [dict(own_parameters(layer)) for layer in self.layers],
        )
        device = self.axis.device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for layer in self.layers:
                layer.__class__ = layer.sliced_from
                held = own_parameters(layer)
                for key, parameter in held.items():
                    with torch.inference_mode(
                        False
                    ):  # the ranks' messages are received outside of it
                        held[key] = (
                            None
                            if parameter is None
                            else nn.Parameter(full_tensor(parameter), False)
                        )
            self._count(self.axis.size, 1)
            self.depth += 1
            try:
                return type(self.module).forward(self.module, *inputs, **options)
            finally:
                self.depth -= 1
                self._count(1, self.axis.size)
                for layer, kind, parameters in zip(self.layers, kinds, own, strict=True):
                    layer.__class__ = kind
                    own_parameters(layer).update(parameters)

    def _count(self, times: int, divided_by: int) -> None:
        for module, key in self.counted:
            setattr(module, key, getattr(module, key) * times // divided_by)

    def _check_split(self, found: Any, expected: Any) -> list[int | None]:
        """Of each tensor the dimension in which this rank has a slice of it. Raises
        StrategyRefused.
        """
        pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=False))
        tensors = [
            (mine, other)
            for mine, other in pairs
            if isinstance(mine, Tensor) and isinstance(other, Tensor)
        ]
        if _tensor_mask(found) != _tensor_mask(expected) or not tensors:
            raise StrategyRefused(
                f"{self._head()}its output has other parts than that of the whole. "
                f"{self._suggestion()}"
            )
        return [self._differing_dim(mine.detach(), other) for mine, other in tensors]

    def _differing_dim(self, found: Tensor, expected: Tensor) -> int | None:
        along = None
        if found.shape != expected.shape and found.dim() == expected.dim():
            apart = [dim for dim in range(found.dim()) if found.shape[dim] != expected.shape[dim]]
            if (
                len(apart) == 1
                and found.shape[apart[0]] * self.axis.size == expected.shape[apart[0]]
            ):
                along = apart[0]
                found = all_gather_dim(found, self.axis, along, expected.shape[along])
        alike = found.shape == expected.shape
        error = _relative_error(found, expected) if alike else torch.inf
        if not error <= TOLERANCES.get(found.dtype, 0.1):
            raise StrategyRefused(
                f"{self._head()}its output is not that of the whole (relative difference "
                f"{error:.1e}). {self._suggestion()}"
            )
        return along

    def _wrap_outputs(self, found: Any) -> Any:
        """The output, with what this rank has a slice of as what knows that."""
        outputs = self.outputs[self.module.training]
        if sum(isinstance(leaf, Tensor) for leaf in tree_leaves(found)) != len(outputs):
            raise StrategyRefused(
                f"{self._head()}its output has other parts than in its first forward pass, which "
                "were not compared "
                f"with those of the whole. {self._suggestion()}"
            )
        if not any(along is not None for along in outputs):
            return found
        left = iter(outputs)

        def handed_on(tensor: Tensor) -> Tensor:
            along = next(left)
            return (
                tensor if along is None else HeadShardedTensor.from_local(tensor, self.axis, along)
            )

        return tree_map_only(Tensor, handed_on, found)

    def _head(self) -> str:
        return f"{self.name or 'the model'}: with its layers in slices "

    def _suggestion(self) -> str:
        return (
            "It does more with them than their names, or the plan, tell. Keep it whole: "
            f"tensor={self.axis.size},whole={self.name or '...'}."
        )


def _tensor_mask(output: Any) -> list[bool]:
    """Which of its parts are tensors."""
    return [isinstance(leaf, Tensor) for leaf in tree_leaves(output)]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    size, error = expected.abs().max().double(), (found.double() - expected.double()).abs().max()
    return float(error / size if size else error)
