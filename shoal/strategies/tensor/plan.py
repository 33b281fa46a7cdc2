"""The tensor plan: which module is divided in which way, and why the others stay replicated.

Each module is planned once, in this order:

    1. torch's attention and transformer layers, by their types
    2. attention by the names of its layers (`find_attention.py`)
    3. embedding and head, along the vocabulary. An embedding is known by its type. A linear layer
       is a head if it has as many outputs as an embedding has rows, and is tied to this embedding
       or has one of the usual names of a head
    4. pairs of linear layers and of convolutions, in traced forward passes (`find_pairs.py`)

A plan depends only on the model, which all ranks have alike, so all ranks make the same plan.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shoal.platform.torch_private.module_state import has_one_width
from shoal.strategies.full_model import FullModel, enclosing
from shoal.strategies.tensor.candidates import (
    CONVOLUTIONS,
    Candidates,
    has_module_hooks,
    is_gpt2_conv1d,
)
from shoal.strategies.tensor.find_attention import AttentionPlan, find_attention
from shoal.strategies.tensor.find_pairs import ColumnRowPair, find_pairs
from shoal.strategies.tensor.graph import RootGraphs, Trace, forward_graphs

HEAD_NAMES = (
    *("head", "lm_head", "output", "decoder", "fc_out"),
    *("classifier", "proj_out", "embed_out", "to_logits"),
)
"""Usual names of the layer that gives a logit for each word."""
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
NO_PAIR = "no layer before or after it makes a pair with it"
"""Reason why a linear layer or convolution stays replicated."""


@dataclass(frozen=True)
class TensorPlan:
    """Names of the modules that are divided over the ranks of a tensor group.

    Args:
        degree: T, the number of these ranks.
        heads: attention that is known by the names of its layers.
        multihead: attention of the type nn.MultiheadAttention.
        embeddings: divided along the vocabulary.
        vocabulary_heads: divided along the vocabulary.
        pairs: of a column parallel and a row parallel layer.
        replicated: modules with matrices that are not divided, and the reason for each.
    """

    degree: int
    heads: tuple[AttentionPlan, ...] = ()
    multihead: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    vocabulary_heads: tuple[str, ...] = ()
    pairs: tuple[ColumnRowPair, ...] = ()
    replicated: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if anything is divided."""
        return bool(
            self.heads or self.multihead or self.embeddings or self.vocabulary_heads or self.pairs
        )

    def within(self, names: Container[str]) -> TensorPlan:
        """Return the plan for the modules of one pipeline stage.

        The row layer stands for its pair and its attention: these lie in one stage.
        """
        return replace(
            self,
            heads=tuple(heads for heads in self.heads if heads.row in names),
            multihead=tuple(name for name in self.multihead if name in names),
            embeddings=tuple(name for name in self.embeddings if name in names),
            vocabulary_heads=tuple(name for name in self.vocabulary_heads if name in names),
            pairs=tuple(pair for pair in self.pairs if pair.row in names),
        )

    def parallel_styles(self) -> dict[str, str]:
        """Return the name of each divided module, with the way in which it is divided."""
        styles: dict[str, str] = dict.fromkeys(self.multihead, "heads")
        for heads in self.heads:
            styles |= dict.fromkeys(heads.columns, "column, by heads")
            styles[heads.row] = "row, by heads"
        styles |= dict.fromkeys((*self.embeddings, *self.vocabulary_heads), "vocabulary")
        for pair in self.pairs:
            styles |= dict.fromkeys(pair.columns, "column")
            styles |= dict.fromkeys(pair.between, "slice")
            styles[pair.row] = "row"
        return styles


def plan(
    model: nn.Module,
    degree: int,
    keep: tuple[str, ...] = (),
    full_model: FullModel | None = None,
    trace: Trace = forward_graphs,
) -> TensorPlan:
    """Plan how `model` is divided over `degree` ranks.

    The model is not changed; its parameters may be on the meta device.

    Args:
        keep: names of modules that stay replicated, with all modules inside them.
        full_model: how `model` is divided into pipeline stages; no pair lies in two of them.
        trace: does what `forward_graphs` does; who plans many degrees traces once.
    """
    kept_modules = {
        module for path, module in model.named_modules() if enclosing(path, keep) is not None
    }
    candidates = Candidates(model, degree, kept_modules, full_model)
    # torch's layers first: their types say all, and nothing needs to be compared or traced.
    multihead = tuple(
        name for name, m in model.named_modules() if _may_shard_multihead(m, name, candidates)
    )
    layers = (
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if _may_shard_feed_forward(module, candidates)
    )
    feed_forward = [
        ColumnRowPair((f"{p}linear1",), (f"{p}dropout",), f"{p}linear2") for p in layers
    ]
    heads = tuple(find_attention(model, candidates))
    made = TensorPlan(degree, heads, multihead, pairs=tuple(feed_forward))
    candidates.remove_planned(made.parallel_styles())

    embeddings, vocabulary_heads = _find_vocabulary(model, candidates)
    candidates.remove_planned((*embeddings, *vocabulary_heads))

    # Attention is planned: a trace need not, and often cannot, look into it.
    attention_names = (*multihead, *(attention.name for attention in heads))
    leaves = {candidates.by_name[name] for name in attention_names}
    pairs = [*feed_forward, *_traced_pairs(trace(model, leaves), candidates)]
    made = TensorPlan(degree, heads, multihead, embeddings, vocabulary_heads, tuple(pairs))
    return replace(made, replicated=_replicated(model, made, candidates, kept_modules))


def _traced_pairs(traced: Iterable[RootGraphs], candidates: Candidates) -> list[ColumnRowPair]:
    """Return the pairs that are in every graph of their root, in the order of the model."""
    order = {name: index for index, name in enumerate(candidates.by_name)}
    pairs: list[ColumnRowPair] = []
    for root, graphs in traced:
        common = set.intersection(*(find_pairs(graph, root, candidates) for graph in graphs))
        pairs += sorted(common, key=lambda pair: order[pair.row])
    return pairs


def _may_shard_multihead(module: nn.Module, name: str, candidates: Candidates) -> bool:
    """Return True for nn.MultiheadAttention that can be divided; else note the reason."""
    if type(module) is not nn.MultiheadAttention or "forward" in vars(module):
        return False
    if module not in candidates.remaining:
        return False
    reason = ""
    if module.num_heads % candidates.degree:
        reason = f"its {module.num_heads} heads are no multiple of {candidates.degree}"
    elif not has_one_width(module) or module.bias_k is not None or module.add_zero_attn:
        reason = "keys and values of other widths, or added biases, are not known here"
    elif (
        not candidates.may_shard(module, (nn.MultiheadAttention,))
        or module.out_proj not in candidates.remaining
    ):
        reason = "it is shared, or has hooks"
    if reason:
        candidates.reasons[name] = reason
    return not reason


def _may_shard_feed_forward(module: Any, candidates: Candidates) -> bool:
    """Return True for a torch transformer layer whose feed-forward pair can be divided."""
    if type(module) not in TRANSFORMER_LAYERS or "forward" in vars(module):
        return False
    activation = module.activation
    activation_name = getattr(activation, "__name__", type(activation).__name__)
    # An activation of the user's may look at several hidden units at once.
    if activation_name not in ("relu", "gelu", "ReLU", "GELU"):
        return False
    if isinstance(activation, nn.Module) and has_module_hooks(activation):
        return False
    layers = (module.linear1, module.linear2)
    return (
        all(candidates.may_shard(layer, (nn.Linear,)) for layer in layers)
        and candidates.may_shard(module.dropout, (nn.Dropout,))
        and module.linear1.out_features % candidates.degree == 0
    )


def _replicated(
    model: nn.Module, made: TensorPlan, candidates: Candidates, kept_modules: set[nn.Module]
) -> dict[str, str]:
    """Return the modules with matrices that are not divided, and the reason for each."""
    divided = made.parallel_styles()
    reasons = {}
    for path, module in model.named_modules():
        has_matrix = any(
            parameter.dim() > 1 for parameter in nn.Module.parameters(module, recurse=False)
        )
        if has_matrix and enclosing(path, divided) is None:
            reason = _replication_reason(path, module, candidates, kept_modules)
            reasons[path or "(the model itself)"] = reason
    return reasons


def _replication_reason(
    path: str, module: nn.Module, candidates: Candidates, kept_modules: set[nn.Module]
) -> str:
    if module in kept_modules:
        return "as was asked"
    if isinstance(module, nn.RNNBase):
        return "its state is needed whole at every time step, an exchange for each"
    noted = enclosing(path, candidates.reasons)
    if noted is not None:
        return candidates.reasons[noted]
    if module in candidates.shared:
        return "its parameters, or itself, are used in several places"
    if isinstance(module, nn.Embedding):
        return "no layer gives a number for each of its rows"
    if isinstance(module, (nn.Linear, *CONVOLUTIONS)) or is_gpt2_conv1d(module):
        return NO_PAIR
    return f"{type(module).__name__} is not known here"


def _find_vocabulary(
    model: nn.Module, candidates: Candidates
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of embeddings and of heads; reasons against others go to the candidates."""
    found = [module for module in model.modules() if type(module) is nn.Embedding]
    linear_heads = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module in candidates.remaining
        and _is_head(name, module, found)
    }
    vocabulary_sizes = {module.out_features for module in linear_heads.values()}
    embeddings = list(_divisible_embeddings(model, vocabulary_sizes, candidates))
    heads = list(_divisible_heads(linear_heads, candidates))
    # An embedding and a head with one parameter must be divided both or neither.
    divisible = _drop_half_tied(model, {*embeddings, *heads})
    return (
        tuple(name for name in embeddings if name in divisible),
        tuple(name for name in heads if name in divisible),
    )


def _is_head(name: str, module: nn.Linear, found: Iterable[nn.Embedding]) -> bool:
    """Return True for a layer that gives a logit for each row of an embedding."""
    embeddings = [other for other in found if other.num_embeddings == module.out_features]
    if any(embedding.weight is module.weight for embedding in embeddings):
        return True
    # A number in the path is the index of a block; a layer called `output` there is no head.
    is_in_block = any(word.isdecimal() for word in name.split("."))
    has_head_name = not is_in_block and name.rpartition(".")[2] in HEAD_NAMES
    return bool(embeddings) and has_head_name


def _divisible_embeddings(
    model: nn.Module, vocabulary_sizes: Container[int], candidates: Candidates
) -> Iterator[str]:
    """Yield names of embeddings of one of these sizes that T divides."""
    for name, module in model.named_modules():
        if type(module) is not nn.Embedding or module.num_embeddings not in vocabulary_sizes:
            continue
        # One that renormalises rows, or has a sparse or scaled gradient: the plan's reason for
        # embeddings will do.
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            continue
        if module.num_embeddings % candidates.degree:
            candidates.reasons[name] = (
                f"its {module.num_embeddings} words are no multiple of {candidates.degree}"
            )
        elif candidates.may_shard(module, (nn.Embedding,), may_be_shared=True):
            yield name


def _divisible_heads(heads: Mapping[str, nn.Linear], candidates: Candidates) -> Iterator[str]:
    """Yield names of heads that T divides and that run in the last stage of a pipeline."""
    full_model = candidates.full_model
    for name, module in heads.items():
        if module.out_features % candidates.degree:
            candidates.reasons[name] = (
                f"its {module.out_features} words are no multiple of {candidates.degree}"
            )
        elif full_model is not None and full_model.stages_running(name) != {
            full_model.output_stage
        }:
            # Its shards of logits would have to cross to the next stage.
            candidates.reasons[name] = "the pipeline is cut behind it"
        elif candidates.may_shard(module, (nn.Linear,), may_be_shared=True):
            yield name


def _drop_half_tied(model: nn.Module, names: set[str]) -> set[str]:
    """Drop modules with a parameter that is tied to a replicated module, until none is left.

    Each module that is dropped becomes replicated, and others may be tied to it.
    """
    while True:
        replicated = {
            id(parameter)
            for name, module in model.named_modules()
            if name not in names
            for parameter in nn.Module.parameters(module, recurse=False)
        }
        half_tied = set()
        for name in names:
            parameters = model.get_submodule(name).parameters(recurse=False)
            if any(id(parameter) in replicated for parameter in parameters):
                half_tied.add(name)
        if not half_tied:
            return names
        names = names - half_tied
