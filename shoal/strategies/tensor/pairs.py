"""Pairs of layers in a graph between which each hidden unit, or channel, is by itself.

    row layer  <──  dropout  <──  mul  <──  silu  <──  column layer          found backwards, from the row layer:
                                   └──────────────────  column layer         whatever feeds it must be known, and
                                                                             must feed nothing else

Only what is in the tables below is known. All else makes a pair no pair, and both layers stay
whole."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from shoal.strategies.full_model import FullModel
from shoal.strategies.tensor.conv1d_gpt2 import is_gpt2_conv1d
from shoal.strategies.tensor.graph import ESCAPES
from shoal.strategies.tensor.hooks import hooked, hooked_boundary, hooked_parameter

LINEAR = (nn.Linear,)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ELEMENTWISE = (
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.CELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Sigmoid,
        nn.Tanh,
    ),
    *(
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.Hardtanh,
        nn.Softplus,
        nn.Softsign,
        nn.LogSigmoid,
        nn.Identity,
        nn.Dropout,
    ),
)
"""Modules that take each entry by itself."""
BY_CHANNEL = (
    *(
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.GroupNorm,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
    ),
    *(
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
    ),
    *(nn.Upsample, nn.ZeroPad2d, *CONVOLUTIONS),
)
"""Modules that take each channel by itself, or each group of them; of an image they see
dimension 1 as channels.
"""
FUNCTIONS = {
    *(
        F.relu,
        F.relu6,
        F.leaky_relu,
        F.elu,
        F.selu,
        F.gelu,
        F.silu,
        F.mish,
        F.hardswish,
        F.softplus,
        F.sigmoid,
        F.tanh,
    ),
    *(torch.relu, torch.sigmoid, torch.tanh, torch.square, torch.abs, operator.neg),
}
"""Functions of one tensor that take each entry by itself."""
METHODS = {"relu", "sigmoid", "tanh", "square", "abs", "contiguous"}
BINARY = {
    operator.add,
    operator.mul,
    operator.sub,
    operator.iadd,
    operator.imul,
    torch.add,
    torch.mul,
    torch.sub,
    torch.pow,
    operator.pow,
}
"""Functions of two slices, or of a slice and a number."""


@dataclass(frozen=True)
class ColumnRowPair:
    """Names of modules.

    Args:
        between: what stands between the two and knows the width, or draws.
        sequential: they are linear layers, which take each token by itself; convolutions do not.
    """

    columns: tuple[str, ...]
    between: tuple[str, ...]
    row: str
    sequential: bool


class Candidates:
    """What may be cut of a model.

    Args:
        degree: T.
        taken: modules that are cut already.
        uncut: where the model is cut in stages, if it is.
    """

    def __init__(
        self,
        model: nn.Module,
        degree: int,
        taken: Iterable[nn.Module],
        uncut: FullModel | None = None,
    ) -> None:
        self.degree, self.uncut = degree, uncut
        self.by_name = dict(model.named_modules())
        self.left = {m: name for name, m in self.by_name.items() if m not in set(taken)}
        parameters = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
        self.shared = {
            m for m in self.left if any(parameters[id(p)] > 1 for p in m.parameters(recurse=False))
        }
        self.shared |= {
            m for m, times in Counter(m for _, m in _all_paths(model)).items() if times > 1
        }
        self.reasons: dict[str, str] = {}
        for module, name in list(self.left.items()):
            if (key := hooked_parameter(module)) is not None:
                self.reasons[name] = f"its {key} has hooks, which would not know of a slice"
                del self.left[module]
        if uncut is not None:
            self._leave_to_stages(uncut)

    def _leave_to_stages(self, uncut: FullModel) -> None:
        """What a plan must know the surroundings of, and stages call in parts or in several
        ways, stays whole.
        """
        read = {id(tensor) for tensor in uncut.directly_read_tensors}
        for module, name in list(self.left.items()):
            if not uncut.stages_running(name):
                del self.left[module]
            elif uncut.called_twice(name):
                self.reasons[name] = "stages call it by itself, and what it lies in"
            elif any(id(p) in read for p in module.parameters(recurse=False)):
                self.reasons[name] = "stages read its parameters by themselves"
            if name in self.reasons:
                del self.left[module]

    def add(self, names: Iterable[str]) -> None:
        """These are cut, with all that is in them."""
        taken = {m for name in names for m in self.by_name[name].modules()}
        self.left = {m: name for m, name in self.left.items() if m not in taken}

    def may_be_cut(self, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
        """Whether it is exactly of a known kind, used in one place, and nobody's hooks see its
        output.
        """
        known = type(module) in kinds or (nn.Linear in kinds and is_gpt2_conv1d(module))
        plain = known and "forward" not in vars(module)
        return plain and module in self.left and module not in self.shared and not hooked(module)


def pairs(graph: fx.Graph, root: str, modules: Candidates) -> set[ColumnRowPair]:
    """All pairs of a graph, the first ones first: none of them overlap."""
    uses = Counter(node.target for node in graph.nodes if node.op == "call_module")
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    found: set[ColumnRowPair] = set()
    taken: set[fx.Node] = set()
    uncut = modules.uncut
    in_stages = uncut is not None and graph in uncut.graphs
    stages = (
        uncut.stages_in(graph) if uncut is not None and in_stages else dict.fromkeys(graph.nodes, 0)
    )
    for node in graph.nodes:
        for kinds in (LINEAR, CONVOLUTIONS):
            walk = PairMatcher(root, modules, kinds, uses, read, taken, stages)
            if walk.is_layer(node) and walk.comes_from_columns(node):
                found.add(walk.pair(node))
                taken |= {node, *walk.columns}
    return found


class PairMatcher:
    """Backwards from one row layer, as far as its own stage reaches.

    Args: stages: of the nodes, where the graph is cut in stages; else 0 for each.
    """

    def __init__(
        self,
        root: str,
        modules: Candidates,
        kinds: tuple[type[nn.Module], ...],
        uses: Counter[Any],
        read: set[str],
        taken: set[fx.Node],
        stages: Mapping[fx.Node, int],
    ) -> None:
        self.prefix, self.modules, self.kinds = f"{root}." if root else "", modules, kinds
        self.uses, self.read, self.taken, self.stages = uses, read, taken, stages
        self.stage: int | None = None
        self.columns: list[fx.Node] = []
        self.inside: set[fx.Node] = set()
        self.between: list[str] = []

    def name(self, node: fx.Node) -> str:
        return f"{self.prefix}{node.target}"

    def is_layer(self, node: fx.Node) -> bool:
        """A layer that could be column or row."""
        if (
            node.op != "call_module"
            or node in self.taken
            or self.uses[node.target] > 1
            or node.target in self.read
        ):
            return False
        module = self.modules.by_name[self.name(node)]
        return (
            self.modules.may_be_cut(module, self.kinds)
            and getattr(module, "groups", 1) == 1
            and _one_input(node)
        )

    def comes_from_columns(self, row: fx.Node) -> bool:
        """Whether its input is known back to column layers, and is seen by it alone."""
        source, self.stage = row.args[0], self.stages.get(row)
        if not isinstance(source, fx.Node) or not self._known(source):
            return False
        takes_slices = self.inside - {*self.columns} | {row}  # a column layer takes what is whole
        alone = all(
            set(node.users) <= takes_slices and ESCAPES not in node.meta for node in self.inside
        )
        return bool(self.columns) and alone and self._fits(row) and self._unseen(row)

    def pair(self, row: fx.Node) -> ColumnRowPair:
        names = sorted({self.name(node) for node in self.columns})
        return ColumnRowPair(
            tuple(names), tuple(sorted(set(self.between))), self.name(row), self.kinds == LINEAR
        )

    def _known(self, node: fx.Node) -> bool:
        if node in self.inside:
            return True
        if self.stages.get(node) != self.stage:
            return False
        self.inside.add(node)
        if self.is_layer(node):
            self.columns.append(node)
            return True
        if node.op == "call_module":
            return self._known_module(node)
        if (
            node.op == "call_function"
            and node.target in BINARY
            and len(node.args) == 2
            and not node.kwargs
        ):
            return all(not isinstance(a, fx.Node) or self._known(a) for a in node.args)
        source = node.args[0] if node.args else None
        return (
            _is_unary(node)
            and node.all_input_nodes == [source]
            and isinstance(source, fx.Node)
            and self._known(source)
        )

    def _known_module(self, node: fx.Node) -> bool:
        module, degree = self.modules.by_name[self.name(node)], self.modules.degree
        channels = BY_CHANNEL if self.kinds == CONVOLUTIONS else ()
        if not _one_input(node) or not self.modules.may_be_cut(module, (*ELEMENTWISE, *channels)):
            return False
        if isinstance(module, CONVOLUTIONS) and (
            module.in_channels != module.out_channels or module.groups % degree
        ):
            return False
        if isinstance(module, nn.GroupNorm) and module.num_groups % degree:
            return self._reason(node, f"its {module.num_groups} groups are no multiple of {degree}")
        if any(True for _ in module.parameters()) or isinstance(module, (nn.Dropout, *BY_CHANNEL)):
            if self.uses[node.target] > 1 or node.target in self.read:
                return False
            self.between.append(self.name(node))
        source = node.args[0]
        return isinstance(source, fx.Node) and self._known(source)

    def _fits(self, row: fx.Node) -> bool:
        module, degree = self.modules.by_name[self.name(row)], self.modules.degree
        width = width_in(module)
        for column in self.columns:
            if (
                other := width_out(self.modules.by_name[self.name(column)])
            ) != width:  # spread, where the two meet
                return self._reason(column, f"its {other} outputs meet {width} of another layer")
        return width % degree == 0 or self._reason(
            row, f"its {width} inputs are no multiple of {degree}"
        )

    def _unseen(self, row: fx.Node) -> bool:
        found = hooked_boundary((*self.inside, row), self.prefix, self.modules.by_name)
        return found is None or self._reason(
            row, f"hooks of {found} would see a slice of what goes by"
        )

    def _reason(self, node: fx.Node, text: str) -> bool:
        self.modules.reasons[self.name(node)] = text
        return False


def width_in(module: Any) -> int:
    """Inputs, or input channels."""
    if is_gpt2_conv1d(module):
        return int(module.weight.shape[0])
    return int(module.in_features if isinstance(module, nn.Linear) else module.in_channels)


def width_out(module: Any) -> int:
    """Outputs, or output channels."""
    if is_gpt2_conv1d(module):
        return int(module.weight.shape[1])
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)


def _is_unary(node: fx.Node) -> bool:
    """True for a call of a function or method that treats each entry of a tensor by itself."""
    known: dict[str, set[Any]] = {"call_function": FUNCTIONS, "call_method": METHODS}
    return node.target in known.get(node.op, ())


def _one_input(node: fx.Node) -> bool:
    return len(node.args) == 1 and not node.kwargs


def _all_paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))
