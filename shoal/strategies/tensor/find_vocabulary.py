"""Find the embedding and the head that can be divided along the vocabulary.

An embedding is known by its type. A linear layer is a head if it has as many outputs as an
embedding has rows, and is tied to this embedding or has one of the usual names of a head.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from torch import nn

from shoal.strategies.tensor.candidates import Candidates

HEAD_NAMES = (
    *("head", "lm_head", "output", "decoder", "fc_out"),
    *("classifier", "proj_out", "embed_out", "to_logits"),
)


def find_vocabulary(
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
