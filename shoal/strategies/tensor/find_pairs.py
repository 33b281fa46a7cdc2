"""Find pairs of layers between which each hidden unit, or each channel, is computed by itself.

    row layer  <──  dropout  <──  mul  <──  silu  <──  column layer      searched backwards
                                   └──────────────────  column layer      from the row layer

The first layer of such a pair becomes column parallel and the second row parallel. Every
operation between them must be known from the tables below, and no other node of the graph may use
a value between them. All other layers stay replicated.

Source: Shoeybi et al., arXiv:1909.08053, section 3 (the pair).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from shoal.strategies.tensor.candidates import (
    CONVOLUTIONS,
    LINEAR,
    Candidates,
    callers_of,
    has_module_hooks,
    modules_on_border,
    width_in,
    width_out,
)
from shoal.strategies.tensor.graph import ESCAPES

_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh),
    *(nn.Softplus, nn.Softsign, nn.LogSigmoid),
)
ELEMENTWISE_MODULES = (*_ACTIVATIONS, nn.Identity, nn.Dropout)
"""Modules that compute each entry by itself."""

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
_POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
CHANNELWISE_MODULES = (*_NORMS, *_POOLING, nn.Upsample, nn.ZeroPad2d, *CONVOLUTIONS)
"""Modules that compute each channel, or each group of channels, by itself. Channels are dim 1."""

ELEMENTWISE_FUNCTIONS = {
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.hardswish),
    *(F.softplus, F.sigmoid, F.tanh),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.square, torch.abs, operator.neg),
}
"""Functions of one tensor that compute each entry by itself."""
ELEMENTWISE_METHODS = {"relu", "sigmoid", "tanh", "square", "abs", "contiguous"}
BINARY_FUNCTIONS = {
    *(operator.add, operator.mul, operator.sub, operator.iadd, operator.imul),
    *(torch.add, torch.mul, torch.sub, torch.pow, operator.pow),
}
"""Functions of two shards, or of a shard and a scalar."""


@dataclass(frozen=True)
class ColumnRowPair:
    """Names of modules that are divided together.

    Args:
        columns: column parallel layers: one, or several of which the products are taken.
        between: modules between the two that have one entry for each unit, or that draw.
        row: the row parallel layer.
        caller: the innermost module whose forward function calls them all, as a trace has seen it;
            None where no trace has: then the innermost module that contains them all.
        called: all modules that a shard goes through, or out of, as a trace has seen.
    """

    columns: tuple[str, ...]
    between: tuple[str, ...]
    row: str
    caller: str | None = None
    called: tuple[str, ...] = ()

    @property
    def region(self) -> str:
        """Name of the innermost module in whose forward pass all layers of the pair run."""
        if self.caller is not None:
            return self.caller
        paths = [name.split(".")[:-1] for name in (*self.columns, *self.between, self.row)]
        common = takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False))
        return ".".join(words[0] for words in common)


def find_pairs(graph: fx.Graph, root: str, candidates: Candidates) -> set[ColumnRowPair]:
    """Return all pairs of a graph. No two overlap: where they could, the earlier one is taken.

    Args:
        graph: a forward pass, from `forward_graphs`.
        root: name of the module whose forward pass it is.
        candidates: gains reasons against layers that almost form a pair.
    """
    matcher = PairMatcher(graph, root, candidates)
    kinds = (LINEAR, CONVOLUTIONS)
    found = (matcher.search(node, kind) for node in graph.nodes for kind in kinds)
    return {pair for pair in found if pair is not None}


class PairMatcher:
    """Searches a graph backwards from row layers for their column layers.

    Args: as of `find_pairs`.

    Attributes:
        stages: node -> pipeline stage; empty without a pipeline. A pair lies in one stage.
        paired: nodes of layers that are in a pair already.
        kinds: LINEAR or CONVOLUTIONS, the kind of both layers in this search.
        columns: nodes of column layers, as far as this search has found them.
        inside: nodes whose values are shards in a pair, the column layers included.
        between: names of modules for `ColumnRowPair.between`.
    """

    def __init__(self, graph: fx.Graph, root: str, candidates: Candidates) -> None:
        full_model = candidates.full_model
        self.prefix = f"{root}." if root else ""
        self.candidates = candidates
        self.stages = {} if full_model is None else full_model.stages_in(graph, root)
        self.paired: set[fx.Node] = set()
        self._calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._directly_read = {
            str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"
        }

    def search(self, row: fx.Node, kinds: tuple[type[nn.Module], ...]) -> ColumnRowPair | None:
        """Return the pair whose row layer a node is; None if it is none."""
        self.kinds = kinds
        self.columns: list[fx.Node] = []
        self.inside: set[fx.Node] = set()
        self.between: list[str] = []
        if not self._is_layer(row) or not self._reaches_columns(row):
            return None
        self.paired |= {row, *self.columns}
        columns = sorted({self._name(node) for node in self.columns})
        between = sorted(set(self.between))
        caller = self._innermost_caller((*self.inside, row))
        calls = {self._name(node) for node in self.inside if node.op == "call_module"}
        called = sorted((calls | self._border(row)) - {*columns, self._name(row)})
        return ColumnRowPair(tuple(columns), tuple(between), self._name(row), caller, tuple(called))

    def _is_used_once(self, node: fx.Node) -> bool:
        """Return True if the graph calls the node's module once and reads no tensor of it."""
        return self._calls[node.target] <= 1 and node.target not in self._directly_read

    def _is_layer(self, node: fx.Node) -> bool:
        """Return True for a call of a layer that could be column or row parallel."""
        if node.op != "call_module" or node in self.paired or not self._is_used_once(node):
            return False
        module = self._module(node)
        return (
            self.candidates.may_shard(module, self.kinds)
            and getattr(module, "groups", 1) == 1
            and _has_one_input(node)
        )

    def _reaches_columns(self, row: fx.Node) -> bool:
        """Return True if the row layer's input comes from column layers, by known operations.

        Only the row layer may use it.
        """
        source = row.args[0]
        self.stage = self.stages.get(row)
        if not isinstance(source, fx.Node) or not self._is_known(source):
            return False
        # A column layer of this pair is no legitimate user: its input is a full tensor.
        users = self.inside - {*self.columns} | {row}
        if not self.columns:
            return False
        for node in self.inside:
            if ESCAPES in node.meta or not set(node.users) <= users:
                return False
        return self._widths_fit(row) and self._no_hook_sees(row)

    def _innermost_caller(self, nodes: Iterable[fx.Node]) -> str | None:
        """Return the module in whose forward function all nodes were recorded, if that is known.

        It need not contain them by name: `self.layers[:3](x)` never calls `self.layers`.
        """
        callers = [callers_of(node) for node in nodes]
        if any(each is None for each in callers):
            return None
        common = set.intersection(*(set(each) for each in callers if each is not None))
        innermost = max(common, key=len, default="")
        return f"{self.prefix}{innermost}".rstrip(".")

    def _name(self, node: fx.Node) -> str:
        return f"{self.prefix}{node.target}"

    def _module(self, node: fx.Node) -> Any:
        return self.candidates.by_name[self._name(node)]

    def _is_known(self, node: fx.Node) -> bool:
        """Return True if all paths back from the node end in column layers."""
        if node in self.inside:
            return True
        if self.stages.get(node) != self.stage:
            return False
        self.inside.add(node)
        if self._is_layer(node):
            self.columns.append(node)
            return True
        if node.op == "call_module":
            return self._is_known_module(node)
        if _is_binary(node):
            # A scalar is no node; it is the same for every hidden unit.
            return all(not isinstance(arg, fx.Node) or self._is_known(arg) for arg in node.args)
        source = node.args[0] if node.args else None
        if not _is_unary(node) or node.all_input_nodes != [source]:
            return False
        return isinstance(source, fx.Node) and self._is_known(source)

    def _is_known_module(self, node: fx.Node) -> bool:
        module = self._module(node)
        degree = self.candidates.degree
        channelwise = CHANNELWISE_MODULES if self.kinds == CONVOLUTIONS else ()
        known_modules = (*ELEMENTWISE_MODULES, *channelwise)
        if not _has_one_input(node) or not self.candidates.may_shard(module, known_modules):
            return False
        # Depthwise, or in groups of which T divides the number: each rank has complete groups.
        if isinstance(module, CONVOLUTIONS) and (
            module.in_channels != module.out_channels or module.groups % degree
        ):
            return False
        if isinstance(module, nn.GroupNorm) and module.num_groups % degree:
            return self._reject(node, f"its {module.num_groups} groups are no multiple of {degree}")
        if _needs_class_swap(module):
            if not self._is_used_once(node):
                return False
            self.between.append(self._name(node))
        source = node.args[0]
        return isinstance(source, fx.Node) and self._is_known(source)

    def _widths_fit(self, row: fx.Node) -> bool:
        width = width_in(self._module(row))
        degree = self.candidates.degree
        for column in self.columns:
            column_width = width_out(self._module(column))
            if column_width != width:  # broadcast over the units where the two are multiplied
                return self._reject(
                    column, f"its {column_width} outputs meet {width} of another layer"
                )
        if width % degree:
            return self._reject(row, f"its {width} inputs are no multiple of {degree}")
        return True

    def _no_hook_sees(self, row: fx.Node) -> bool:
        for name in sorted(self._border(row)):
            if has_module_hooks(self.candidates.by_name[name]):
                return self._reject(row, f"hooks of {name} would see a slice of what goes by")
        return True

    def _border(self, row: fx.Node) -> set[str]:
        return {self.prefix + path for path in modules_on_border((*self.inside, row))}

    def _reject(self, node: fx.Node, reason: str) -> bool:
        """Note why the node's module stays replicated, and return False."""
        self.candidates.reasons[self._name(node)] = reason
        return False


def _needs_class_swap(module: nn.Module) -> bool:
    """Return True for a module that `apply` may replace: it has parameters, or draws, or pools."""
    has_parameters = any(True for _ in module.parameters())
    return has_parameters or isinstance(module, (nn.Dropout, *CHANNELWISE_MODULES))


def _is_binary(node: fx.Node) -> bool:
    is_known = node.op == "call_function" and node.target in BINARY_FUNCTIONS
    return is_known and len(node.args) == 2 and not node.kwargs


def _is_unary(node: fx.Node) -> bool:
    """Return True for a call of a function or method that computes each entry by itself."""
    if node.op == "call_function":
        return node.target in ELEMENTWISE_FUNCTIONS
    return node.op == "call_method" and node.target in ELEMENTWISE_METHODS


def _has_one_input(node: fx.Node) -> bool:
    return len(node.args) == 1 and not node.kwargs
