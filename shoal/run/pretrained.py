"""`run.save_pretrained`: a model in the form of its own library, such as transformers or peft."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from shoal.comm.mesh import Mesh
from shoal.errors import UsageError
from shoal.run.prepare_arguments import named_models
from shoal.run.state_access import access_by_shoal
from shoal.run.train_state import whole_on_rank_zero, write_on_rank_zero
from shoal.strategies.base import LocalModel


def choose(models: Sequence[nn.Module], wanted: nn.Module | None) -> tuple[str, nn.Module]:
    """Return the model to save, and the prefix of its names among those of all prepared models.

    Raises: UsageError: there is none, or more than one, or `wanted` was not prepared.
    """
    by_prefix = named_models(models)
    if wanted is not None:
        by_prefix = {prefix: model for prefix, model in by_prefix.items() if model is wanted}
        if not by_prefix:
            raise UsageError("run.save_pretrained: this model was not given to run.prepare.")
    saving = {
        prefix: model for prefix, model in by_prefix.items() if hasattr(model, "save_pretrained")
    }
    if not saving:
        kinds = ", ".join(type(model).__name__ for model in by_prefix.values())
        raise UsageError(
            f"run.save_pretrained: {kinds} has no method save_pretrained, as models of "
            'transformers and peft have. Use run.save("model.safetensors").'
        )
    if len(saving) > 1:
        raise UsageError(
            f"run.save_pretrained: {len(saving)} prepared models have save_pretrained. Say which: "
            "run.save_pretrained(directory, model)."
        )
    ((prefix, model),) = saving.items()
    _check_takes_weights(model)
    return prefix, model


def _check_takes_weights(model: Any) -> None:
    """Raise UsageError for a model that would save its own weights, which may be shards."""
    parameters = inspect.signature(model.save_pretrained).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if "state_dict" not in parameters and not takes_any:
        raise UsageError(
            f"run.save_pretrained: {type(model).__name__}.save_pretrained takes no state_dict, and "
            "would save what this rank holds. Use run.weights(), or "
            'run.save("model.safetensors").'
        )


def save(
    model: Any,
    prefix: str,
    local_model: LocalModel,
    mesh: Mesh,
    directory: str | Path,
    options: Mapping[str, Any],
) -> None:
    """Call the model's `save_pretrained` on rank 0, with whole weights. Collective.

    Raises: CheckpointError: on every rank, if it failed.
    """
    whole = whole_on_rank_zero(local_model, mesh)
    state = {
        name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)
    }

    def write() -> None:
        with access_by_shoal():  # it may look at the model too, of which this is a part
            model.save_pretrained(directory, state_dict=state, **options)

    write_on_rank_zero(mesh, directory, write)
