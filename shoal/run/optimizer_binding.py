"""Which optimizer group owns which parameter, by name; what an optimizer holds, by name.

Strategies may replace a parameter by a slice of it. An optimizer that still points at the old
tensor trains nothing and says nothing (pytorch#149205), so it is bound again by name, and every
trainable parameter must be owned exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shoal.errors import CheckpointError, StrategyRefused, UsageError
from shoal.platform.torch_private.subclasses import is_made_of_tensors

Scalars = dict[str, dict[str, float | int | bool | None]]

NEED_WHOLE = {
    "Adafactor": "its means of rows and columns need whole matrices, and torch's takes no shards of them",
    "Rprop": "torch's assigns through a mask, which sharded tensors do not take",
}
"""Optimizers that fail on shards, in their first step."""


@runtime_checkable
class QuantizedOptimizer(Protocol):
    """An optimizer with state that is no plain tensor, and that knows how to store it: see
    `shoal.optim.adamw8bit`.
    """

    def shard_state(self, parameter: Tensor, key: str, value: Tensor) -> dict[str, Tensor]: ...

    def unshard_state(self, parameter: Tensor, key: str, parts: dict[str, Tensor]) -> Tensor: ...


def group_param_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each group. Raises UsageError unless each trainable one is in
    exactly one group.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    problems = list(_unbound(model, names, held))
    if problems:
        raise UsageError("\n".join(problems))
    return [
        [names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups
    ]


def _unbound(model: nn.Module, names: Mapping[int, str], held: Sequence[Tensor]) -> Iterator[str]:
    """Problems where the parameters of an optimizer are not each trainable one of the model, once.

    Args: names: of the model's parameters, by their `id`.
    """
    counts = Counter(id(parameter) for parameter in held)
    lost = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in counts]
    if lost:
        yield (
            f"{_listed(lost)}: trainable, but in no group of the optimizer. Build the optimizer "
            "after the last change "
            "to the model, add them to a group, or freeze them with requires_grad_(False)."
        )
    twice = [names[key] for key, count in counts.items() if count > 1 and key in names]
    if twice:
        yield f"{_listed(twice)}: in more than one group of the optimizer; keep one."
    strange = sum(id(parameter) not in names for parameter in held)
    if strange:
        yield (
            f"{strange} of the optimizer's {len(held)} parameters do not belong to the model. Was "
            "the model copied, "
            "moved or wrapped after the optimizer was built? Build it from the parameters of this "
            "model."
        )


def bind_optimizer(
    optimizer: Optimizer, groups: list[list[str]], owned: Mapping[str, nn.Parameter]
) -> None:
    """Point every group at what this rank owns of it. Frozen parameters drop out: they are
    never stepped.
    """
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [owned[name] for name in names if name in owned]
    bound = sum(len(group["params"]) for group in optimizer.param_groups)
    assert bound == len(owned), (
        f"{len(owned)} parameters are owned here, {bound} are in the optimizer"
    )


def refuse_shards(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> None:
    """Raise StrategyRefused where parameters are sharded and the optimizer cannot step shards
    as it steps the whole.
    """
    _refuse_lists(optimizer, owned)
    kind, sharded = (
        type(optimizer),
        [name for name, parameter in owned.items() if _is_sharded(parameter)],
    )
    if not sharded:
        return
    if kind.__module__.startswith("torch.optim") and kind.__name__ in NEED_WHOLE:
        raise StrategyRefused(
            f"{kind.__name__} cannot step the shards of {_listed(sharded)}: "
            f"{NEED_WHOLE[kind.__name__]}. Use ddp, or "
            "another optimizer such as AdamW."
        )
    sliced = [name for name in sharded if _is_sliced(owned[name])]
    if sliced and isinstance(optimizer, QuantizedOptimizer):
        raise StrategyRefused(
            f"{kind.__name__} quantises blocks of whole rows, and {_listed(sliced)} are cut along "
            "the tensor axis. Use "
            "AdamW, or leave out tensor."
        )
    if kind.__module__.startswith("torchao."):
        raise StrategyRefused(
            f"torchao's {kind.__name__} quantises what each rank holds of {_listed(sharded)}, so "
            "its numbers depend on "
            "the number of ranks (pytorch/ao#4912). Use AdamW8bit of shoal.optim.adamw8bit, or ddp."
        )


def _refuse_lists(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> None:
    """torch steps no list of parameters that lie on different meshes."""
    meshes = {
        parameter.device_mesh if isinstance(parameter, DTensor) else None
        for parameter in owned.values()
    }
    asked = [
        key
        for key in ("foreach", "fused")
        if any(group.get(key) for group in optimizer.param_groups)
    ]
    if len(meshes) > 1 and asked:
        raise StrategyRefused(
            f"{type(optimizer).__name__}({asked[0]}=True) steps lists of parameters, and torch "
            "takes none of whole and "
            f"sliced ones. Leave {asked[0]} out."
        )


def _is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and not all(
        isinstance(axis, Replicate) for axis in parameter.placements
    )


def _is_sliced(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "tensor" in (
        parameter.device_mesh.mesh_dim_names or ()
    )


def optimizer_state(
    optimizer: Optimizer, owned: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], Scalars]:
    """What the optimizer has gathered: tensors as `name.key`, plain numbers apart, so that no
    pickle is needed.

    Where the optimizer takes a tensor apart, its parts are `name.key.part`.
    """
    tensors: dict[str, Tensor] = {}
    scalars: Scalars = {}
    for name, parameter in owned.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            parts: dict[str, Tensor] = {}
            if isinstance(value, Tensor) and isinstance(optimizer, QuantizedOptimizer):
                parts = optimizer.shard_state(parameter, key, value)
            if parts:
                tensors |= {f"{name}.{key}.{part}": tensor for part, tensor in parts.items()}
            elif isinstance(value, Tensor) and _is_plain(value):
                tensors[f"{name}.{key}"] = value
            elif value is None or isinstance(value, (bool, int, float)):
                scalars.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} under '{key}' for "
                    f"{name}; "
                    "only plain tensors and numbers can be saved without pickle. For 8-bit states "
                    "use AdamW8bit of "
                    "shoal.optim.adamw8bit."
                )
    return tensors, scalars


def load_optimizer_state(
    optimizer: Optimizer,
    owned: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    scalars: Scalars,
) -> None:
    """The inverse of `optimizer_state`, in today's layout."""
    by_name: dict[str, dict[str, Any]] = {name: dict(values) for name, values in scalars.items()}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, key, part = split_state_key(path, owned)
        parts.setdefault((name, key), {})[part] = tensor
    for (name, key), found in parts.items():
        by_name.setdefault(name, {})[key] = _put_together(optimizer, owned.get(name), key, found)
    unknown = sorted(set(by_name) - set(owned))
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {_listed(unknown)}, which the model lacks."
        )
    state = optimizer.state_dict()
    index = {
        id(p): i
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    state["state"] = {index[id(owned[name])]: values for name, values in by_name.items()}
    with torch.no_grad():
        optimizer.load_state_dict(state)
    # torch casts floating state to the parameter's dtype; some of it, NAdam's mu_product say, has
    # one of its own.
    for name, values in by_name.items():
        held = optimizer.state[owned[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


def split_state_key(path: str, owned: Mapping[str, nn.Parameter]) -> tuple[str, str, str]:
    """Parameter, key and part that a name of `optimizer_state` stands for; "" for the part of
    what is whole.
    """
    name, _, key = path.rpartition(".")
    outer, _, inner = name.rpartition(".")
    return (outer, inner, key) if name not in owned and outer in owned else (name, key, "")


def _put_together(
    optimizer: Optimizer, parameter: Tensor | None, key: str, parts: dict[str, Tensor]
) -> Tensor:
    if isinstance(optimizer, QuantizedOptimizer) and parameter is not None:
        return optimizer.unshard_state(parameter, key, parts)
    if "" not in parts:
        raise CheckpointError(
            f"the checkpoint holds '{key}' in 8 bits, and this optimizer is "
            f"{type(optimizer).__name__}. Use AdamW8bit, "
            "which saved it, or start afresh."
        )
    return parts[""]


def _is_plain(value: Tensor) -> bool:
    return not is_made_of_tensors(value.to_local() if isinstance(value, DTensor) else value)


def group_settings(optimizer: Optimizer) -> list[dict[str, float | int | bool]]:
    """Learning rate and other plain numbers of each group, which a scheduler may have changed."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if _is_number(value)
        }
        for group in optimizer.param_groups
    ]


def load_group_settings(
    optimizer: Optimizer, settings: list[dict[str, float | int | bool]]
) -> None:
    """The inverse of `group_settings`."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        rate = group["lr"]
        for key, value in saved.items():
            # Some optimizers want their rate as a tensor, so that a compiled step is not compiled
            # anew for each.
            as_tensor = isinstance(rate, Tensor) and key in ("lr", "initial_lr")
            group[key] = torch.full_like(rate, value) if as_tensor else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
