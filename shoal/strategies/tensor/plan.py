"""Which module is cut how, and what stays whole: made from the model itself, or from the user's own
words.

In this order, each module once: torch's attention and transformer layers by their type, attention
by the names in it, the vocabulary, then pairs of linear layers and of convolutions that a look into
the forward passes has found."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from torch import nn

from shoal.platform.torch_private.module_state import has_one_width
from shoal.strategies.full_model import FullModel
from shoal.strategies.tensor.graph import graphs
from shoal.strategies.tensor.heads import AttentionPlan, find_attentions
from shoal.strategies.tensor.hooks import hooked
from shoal.strategies.tensor.pairs import CONVOLUTIONS, Candidates, ColumnRowPair, pairs
from shoal.strategies.tensor.user_plan import apply_user_plan

HEAD_NAMES = (
    "head",
    "lm_head",
    "output",
    "decoder",
    "fc_out",
    "classifier",
    "proj_out",
    "embed_out",
    "to_logits",
)
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
NO_PAIR = "no layer before or after it makes a pair with it"
"""Why a layer stays whole."""


@dataclass(frozen=True)
class TensorPlan:
    """What is cut, by the names of modules.

    Args:
        degree: T.
        heads: attention that is known by the names in it. multihead: torch's own.
        embeddings, vocabulary_heads: cut by words. pairs: of layers.
        whole: what stays whole though it has parameters that could be cut, and why.
    """

    degree: int
    heads: tuple[AttentionPlan, ...] = ()
    multihead: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    vocabulary_heads: tuple[str, ...] = ()
    pairs: tuple[ColumnRowPair, ...] = ()
    replicated: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.heads or self.multihead or self.embeddings or self.vocabulary_heads or self.pairs
        )

    def within(self, names: Container[str]) -> TensorPlan:
        """What of it concerns these modules, those of one rank of a pipeline. What belongs
        together is in one stage.
        """
        return replace(
            self,
            heads=tuple(heads for heads in self.heads if heads.row in names),
            multihead=tuple(name for name in self.multihead if name in names),
            embeddings=tuple(name for name in self.embeddings if name in names),
            vocabulary_heads=tuple(name for name in self.vocabulary_heads if name in names),
            pairs=tuple(pair for pair in self.pairs if pair.row in names),
        )

    def boundaries(self) -> tuple[list[str], list[str]]:
        """Where the stream between what is cut begins, and where it ends."""
        pairs = [pair for pair in self.pairs if pair.sequential]
        rows = [
            *(heads.row for heads in self.heads),
            *self.multihead,
            *(pair.row for pair in pairs),
        ]
        columns = [name for heads in self.heads for name in heads.columns]
        columns += [
            *self.multihead,
            *(name for pair in pairs for name in pair.columns),
            *self.vocabulary_heads,
        ]
        return [*self.embeddings, *rows], columns

    def is_sharded(self) -> dict[str, str]:
        """How each module is cut, by its name."""
        found: dict[str, str] = dict.fromkeys(self.multihead, "heads")
        for heads in self.heads:
            found |= dict.fromkeys(heads.columns, "column, by heads") | {heads.row: "row, by heads"}
        found |= dict.fromkeys((*self.embeddings, *self.vocabulary_heads), "vocabulary")
        for pair in self.pairs:
            found |= (
                dict.fromkeys(pair.columns, "column")
                | dict.fromkeys(pair.between, "slice")
                | {pair.row: "row"}
            )
        return found


def plan(
    model: nn.Module,
    degree: int,
    keep: tuple[str, ...] = (),
    own: Sequence[tuple[str, str]] = (),
    uncut: FullModel | None = None,
) -> TensorPlan:
    """What of `model` can be cut in `degree` slices. It is not changed; parameters may be on the
    meta device.

    Args: keep: names of modules that stay whole, with all that is in them. own: what is to be cut
        and nothing else: patterns of names, each to be cut by "column" or "row". uncut: where
        `model` is cut in stages, if it is: no pair lies in two of them.

    Raises: StrategyRefused: `own` is not what can be done.
    """
    kept = {
        m
        for n, m in model.named_modules()
        if any(n == name or n.startswith(f"{name}.") for name in keep)
    }
    modules = Candidates(model, degree, kept, uncut)
    if own:
        made = TensorPlan(degree, heads=tuple(apply_user_plan(model, own, modules)))
        return replace(
            made,
            replicated=dict.fromkeys(
                _replicated(model, made, modules, kept), "it is not in the plan"
            ),
        )
    multihead = tuple(name for name, m in model.named_modules() if _is_multihead(m, name, modules))
    feed_forward = [
        _feed_forward(name, m) for name, m in model.named_modules() if _has_feed_forward(m, modules)
    ]
    heads = tuple(find_attentions(model, modules))
    leaves = {modules.by_name[name] for name in (*multihead, *(h.name for h in heads))}
    modules.add(TensorPlan(degree, heads, multihead, pairs=tuple(feed_forward)).is_sharded())
    embeddings, vocabulary_heads = _vocabulary(model, modules)
    modules.add((*embeddings, *vocabulary_heads))
    found = [*feed_forward]
    for root, looked_at in graphs(model, leaves, uncut):
        common = set.intersection(*(pairs(graph, root, modules) for graph in looked_at))
        found += sorted(common, key=lambda pair: [*modules.by_name].index(pair.row))
    made = TensorPlan(degree, heads, multihead, embeddings, vocabulary_heads, tuple(found))
    return replace(made, replicated=_replicated(model, made, modules, kept))


def region_of(pair: ColumnRowPair) -> str:
    """The innermost module that has all layers of a pair in it."""
    paths = [name.split(".")[:-1] for name in (*pair.columns, *pair.between, pair.row)]
    same = takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False))
    return ".".join(words[0] for words in same)


def _is_multihead(module: nn.Module, name: str, modules: Candidates) -> bool:
    if (
        type(module) is not nn.MultiheadAttention
        or module not in modules.left
        or "forward" in vars(module)
    ):
        return False
    same = has_one_width(module) and module.bias_k is None and not module.add_zero_attn
    if module.num_heads % modules.degree:
        modules.reasons[name] = f"its {module.num_heads} heads are no multiple of {modules.degree}"
    elif not same:
        modules.reasons[name] = (
            "keys and values of other widths, or added biases, are not known here"
        )
    elif (
        not modules.may_be_cut(module, (nn.MultiheadAttention,))
        or module.out_proj not in modules.left
    ):
        modules.reasons[name] = "it is shared, or has hooks"
    else:
        return True
    return False


def _has_feed_forward(module: Any, modules: Candidates) -> bool:
    if type(module) not in TRANSFORMER_LAYERS or "forward" in vars(module):
        return False
    known = getattr(module.activation, "__name__", type(module.activation).__name__) in (
        "relu",
        "gelu",
        "ReLU",
        "GELU",
    )
    layers = (module.linear1, module.linear2)
    return (
        known
        and all(modules.may_be_cut(layer, (nn.Linear,)) for layer in layers)
        and modules.may_be_cut(module.dropout, (nn.Dropout,))
        and not (isinstance(module.activation, nn.Module) and hooked(module.activation))
        and layers[0].out_features % modules.degree == 0
    )


def _feed_forward(name: str, _: nn.Module) -> ColumnRowPair:
    prefix = f"{name}." if name else ""
    return ColumnRowPair((f"{prefix}linear1",), (f"{prefix}dropout",), f"{prefix}linear2", True)


def _vocabulary(model: nn.Module, modules: Candidates) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Embeddings of words, and layers that give a logit for each of them."""
    linear = {
        name: m for name, m in model.named_modules() if type(m) is nn.Linear and m in modules.left
    }
    candidates = {name: m for name, m in linear.items() if _is_head(name, m, model)}
    embeddings = list(_embeddings(model, {m.out_features for m in candidates.values()}, modules))
    heads = list(_vocabulary_heads(candidates, modules))
    cut = _drop_unmatched_ties(model, {*embeddings, *heads})
    return tuple(name for name in embeddings if name in cut), tuple(
        name for name in heads if name in cut
    )


def _embeddings(model: nn.Module, words: Container[int], modules: Candidates) -> Iterator[str]:
    """Names of embeddings that can be cut, whose number of words is one of `words`."""
    for name, module in model.named_modules():
        if (
            type(module) is not nn.Embedding
            or module.num_embeddings not in words
            or not _plain_embedding(module)
        ):
            continue
        if module.num_embeddings % modules.degree:
            modules.reasons[name] = (
                f"its {module.num_embeddings} words are no multiple of {modules.degree}"
            )
        elif _is_plain(module, modules):
            yield name


def _vocabulary_heads(candidates: Mapping[str, nn.Linear], modules: Candidates) -> Iterator[str]:
    """Names of the candidates that can be cut."""
    for name, module in candidates.items():
        if module.out_features % modules.degree:
            modules.reasons[name] = (
                f"its {module.out_features} words are no multiple of {modules.degree}"
            )
        elif modules.uncut is not None and modules.uncut.stages_running(name) != {
            modules.uncut.output_stage
        }:
            modules.reasons[name] = "the pipeline is cut behind it"
        elif _is_plain(module, modules):
            yield name


def _is_plain(module: nn.Module, modules: Candidates) -> bool:
    return module in modules.left and "forward" not in vars(module) and not hooked(module)


def _drop_unmatched_ties(model: nn.Module, names: set[str]) -> set[str]:
    """Those whose parameters nothing else has: one that is tied to what stays whole stays whole
    too.
    """
    while True:
        outside = {
            id(p)
            for name, m in model.named_modules()
            if name not in names
            for p in m.parameters(recurse=False)
        }
        tied = {
            n
            for n in names
            if any(id(p) in outside for p in model.get_submodule(n).parameters(recurse=False))
        }
        if not tied:
            return names
        names = names - tied


def _is_head(name: str, module: nn.Linear, model: nn.Module) -> bool:
    """A layer that gives as many numbers as an embedding has words, and is called so or tied to
    it.
    """
    same = [
        m
        for m in model.modules()
        if type(m) is nn.Embedding and m.num_embeddings == module.out_features
    ]
    once = not any(word.isdecimal() for word in name.split("."))  # no part of a block
    called = once and name.rpartition(".")[2] in HEAD_NAMES
    return any(m.weight is module.weight for m in same) or (bool(same) and called)


def _plain_embedding(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _replicated(
    model: nn.Module, made: TensorPlan, modules: Candidates, kept: set[nn.Module]
) -> dict[str, str]:
    """Matrices that stay whole, and why."""
    cut, found = made.is_sharded(), {}
    for path, module in model.named_modules():
        has_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if has_matrix and not any(_lies_in(path, other) for other in cut):
            found[path or "(the model itself)"] = _why_whole(path, module, modules, kept)
    return found


def _why_whole(path: str, module: nn.Module, modules: Candidates, kept: set[nn.Module]) -> str:
    outer = next((reason for name, reason in modules.reasons.items() if _lies_in(path, name)), None)
    if module in kept:
        return "as was asked"
    if isinstance(module, nn.RNNBase):
        return "its state is needed whole at every time step, an exchange for each"
    if outer is not None:
        return outer
    if module in modules.shared:
        return "its parameters, or itself, are used in several places"
    if isinstance(module, nn.Embedding):
        return "no layer gives a number for each of its rows"
    if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return NO_PAIR
    return f"{type(module).__name__} is not known here"


def _lies_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")
