"""An optimizer's groups and state by the names of parameters.

Every trainable parameter must be in exactly one group of one optimizer: one that is in none is
never stepped, without any error.

A strategy may replace a parameter by a shard of it. An optimizer that still holds the old tensor
trains nothing, without any error (pytorch#149205). So every optimizer is bound again by names, and
`BoundGroups` knows which parameters the models show for those that it holds then.

Tensors that an optimizer keeps in attributes of its own cannot be bound, and are refused:

self.slow = [p.clone() for p in params]   a tensor for each parameter, found by its position
self.params = list(params)                the parameters themselves
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shoal.comm.assembly import shard_like
from shoal.comm.norm import to_local
from shoal.errors import CheckpointError, StrategyRefused, UsageError
from shoal.optim.traits import declaration, is_elementwise, is_parameterwise
from shoal.platform.torch_private.subclasses import is_made_of_tensors
from shoal.run.checks import check_takes_scaled
from shoal.run.local_shard_step import name_local_state
from shoal.run.state_access import access_by_shoal
from shoal.strategies.base import LocalModel
from shoal.strategies.full_model import given_up_params
from shoal.strategies.tensor.sliced_parameters import is_tensor_sharded
from shoal.strategies.transforms.precision import LossScale

Groups = list[list[Tensor]]


class BoundGroups:
    """Remembers the groups of optimizers while strategies are applied.

    Before that, and of optimizers that are not bound, groups are as their optimizer has them.
    """

    def __init__(self) -> None:
        self._shown: dict[int, Tensor] = {}
        self._known: dict[int, Tensor] = {}

    def note(self, root: nn.Module, owned: Mapping[str, nn.Parameter]) -> None:
        """Note what optimizers were bound to.

        Args:
            root: with the parameters that the models show.
            owned: this rank's parameters, by name.
        """
        shown = dict(root.named_parameters())
        self._shown = {id(owned[name]): shown[name] for name in owned if name in shown}
        for parameter in shown.values():
            self._shown |= {id(each): parameter for each in given_up_params(parameter)}
        self._known = {id(p): p for p in shown.values()}

    def replaced(self, root: nn.Module) -> list[str]:
        """Return the names of trained parameters of `root` that were not there when optimizers were
        bound, as after a layer was replaced.
        """
        named = root.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in self._known]

    def of(self, optimizer: Optimizer) -> Groups:
        """Return the groups of an optimizer, with what the models show."""
        return [
            [self._shown.get(id(parameter), parameter) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]

    def names(self, optimizers: Sequence[Optimizer], root: nn.Module) -> list[list[list[str]]]:
        """Return for each optimizer, for each of its groups, the names of its parameters.

        Raises:
            UsageError: a trainable parameter is not in exactly one group, or a group has a
                parameter of no prepared model.
        """
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        groups = [self.of(optimizer) for optimizer in optimizers]
        params = [parameter for of_one in groups for group in of_one for parameter in group]
        problems = list(_problems_of_groups(root, names, params))
        if problems:
            raise UsageError("\n".join(problems))
        return [[[names[id(p)] for p in group] for group in of_one] for of_one in groups]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _problems_of_groups(
    root: nn.Module, names: Mapping[int, str], params: Sequence[Tensor]
) -> Iterator[str]:
    """Yield a sentence if trainable parameters are missing, are there twice, or are foreign.

    Args:
        names: names of the models' parameters by their `id`.
        params: the parameters in all groups of all optimizers.
    """
    counts = Counter(id(parameter) for parameter in params)
    missing = [n for n, p in root.named_parameters() if p.requires_grad and id(p) not in counts]
    if missing:
        yield (
            f"{listed(missing)}: trainable, but in no group of the optimizer. Build the optimizer "
            "after the last change to the model, add them to a group, or freeze them with "
            "requires_grad_(False)."
        )
    twice = [names[key] for key, count in counts.items() if count > 1 and key in names]
    if twice:
        yield f"{listed(twice)}: in several groups or optimizers. Leave each parameter in one."
    foreign = sum(id(parameter) not in names for parameter in params)
    if foreign:
        yield (
            f"{foreign} of the optimizer's {len(params)} parameters do not belong to the model. "
            "Was the model copied, moved or wrapped after the optimizer was built? Build it from "
            "the parameters of this model. A parameter of no model, such as a learned weight of a "
            "loss, goes into a module of its own, which run.prepare is given as well."
        )


def listed(names: list[str], max_names: int = 5) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


Scalars = dict[str, dict[str, float | int | bool | None]]

_BOUND = ("param_groups", "state", "defaults")
_DEEPEST = 4


@runtime_checkable
class QuantizedOptimizer(Protocol):
    """An optimizer with state that is no plain tensor: see `shoal.optim.adamw8bit`."""

    def shard_state(self, parameter: Tensor, key: str, value: Tensor) -> dict[str, Tensor]:
        """Return plain tensors from which `unshard_state` makes `value`; {} if it is plain."""

    def unshard_state(self, parameter: Tensor, key: str, parts: dict[str, Tensor]) -> Tensor:
        """Return the state tensor that `shard_state` has taken apart."""


def bind_optimizers(
    optimizers: Sequence[Optimizer],
    groups: Sequence[list[list[str]]],
    root: nn.Module,
    local_model: LocalModel,
    loss_scale: LossScale | None,
) -> None:
    """Point the optimizers at what this rank owns, or hand that to parameter servers. Collective.

    Args:
        groups: for each optimizer, for each of its groups, the names of its parameters.
        root: the models as scripts see them.
        loss_scale: of fp16, which gradients carry; None without it.

    Raises: StrategyRefused: an optimizer or the loss scale does not go with the strategy.
    """
    owned = local_model.trainable_params
    absent = {
        name: parameter
        for name, parameter in root.named_parameters()
        if local_model.is_partial and parameter.requires_grad
    }
    for optimizer, names in zip(optimizers, groups, strict=True):
        mine = {name: owned[name] for group in names for name in group if name in owned}
        check_keeps_no_tensors(optimizer, names, mine)  # a trial of such a one would mislead
        if local_model.is_partial:
            check_steps_stages(optimizer)
        check_steps_shards(optimizer, mine)
        _bind_optimizer(optimizer, names, mine, absent)
    if loss_scale is not None:
        check_takes_scaled(local_model)
    if local_model.remote_optimizer is not None:
        if len(optimizers) > 1:
            raise StrategyRefused(
                "strategy server: servers step all parameters by one optimizer, and "
                f"{len(optimizers)} were prepared. Use one optimizer with several groups, or ddp "
                "or zero1, where each optimizer steps by itself."
            )
        local_model.remote_optimizer.attach(optimizers[0])


def _bind_optimizer(
    optimizer: Optimizer,
    groups: list[list[str]],
    owned: Mapping[str, nn.Parameter],
    absent: Mapping[str, nn.Parameter],
) -> None:
    """Replace the parameters of every group by those that this rank owns, by name.

    Frozen parameters leave their group: they are never stepped. State that a parameter has by now,
    from a checkpoint of the script's own for example, is cut as the parameter is.

    Args: absent: those that ranks of other pipeline stages own. They stay in their group, so that a
        script sees those of the whole model; `Prepared` takes them out for each step.
    """
    held = {**absent, **owned}
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        for old, name in zip(group["params"], names, strict=True):
            if old is owned.get(name):
                continue
            state = optimizer.state.pop(old, None)
            if state and name in owned:
                optimizer.state[owned[name]] = cut_parameter_state(state, old.shape, owned[name])
        group["params"] = [held[name] for name in names if name in held]


def cut_parameter_state(
    values: Mapping[str, Any], full_shape: torch.Size, parameter: Tensor
) -> dict[str, Any]:
    """Return the optimizer state of one parameter, cut as the parameter is.

    Args:
        values: of the full parameter; scalars and numbers stay as they are.
        full_shape: shape of the full parameter.

    Raises: UsageError: a tensor of another shape, of which nobody knows how it is cut.
    """
    cut: dict[str, Any] = {}
    for key, value in values.items():
        is_full = isinstance(value, Tensor) and value.dim() > 0
        if is_full and value.shape != full_shape and shard_like(value, parameter) is not value:
            raise UsageError(
                f"the optimizer's state '{key}' has shape {tuple(value.shape)} for a parameter of "
                f"shape {tuple(full_shape)}, which is divided over ranks. Load it under ddp."
            )
        cut[key] = shard_like(value, parameter) if is_full else value
    return cut


def check_steps_shards(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> None:
    """Raise StrategyRefused if a step of shards may not be the step of the full parameters."""
    kind = type(optimizer)
    sharded = [name for name, parameter in owned.items() if is_shard(parameter)]
    if not sharded:
        return
    tensor_parallel = [name for name in sharded if is_tensor_sharded(owned[name])]
    if tensor_parallel and isinstance(optimizer, QuantizedOptimizer):
        raise StrategyRefused(
            f"{kind.__name__} quantises blocks of whole rows, and {listed(tensor_parallel)} are "
            "cut along the tensor axis. Use AdamW, or leave out tensor."
        )
    if not (is_elementwise(kind) or isinstance(optimizer, QuantizedOptimizer)):
        raise StrategyRefused(
            f"{kind.__name__} cannot step the shards of {listed(sharded)}: it may look at whole "
            "tensors, such as at their norms, or at blocks or rows of them. "
            f"{declaration(kind, 'elementwise')}Use ddp, or another optimizer such as AdamW, or "
            "AdamW8bit of shoal.optim for 8-bit states."
        )


def check_steps_stages(optimizer: Optimizer) -> None:
    """Raise StrategyRefused if steps of some layers may not be those of the whole model's."""
    kind = type(optimizer)
    if is_parameterwise(kind) or isinstance(optimizer, QuantizedOptimizer):
        return
    raise StrategyRefused(
        f"{kind.__name__} cannot step the stages of a pipeline one by one: it may look at all "
        "parameters together, such as at the norm of all gradients, and no rank has all of them. "
        f"{declaration(kind, 'parameterwise')}Use ddp, or another optimizer such as AdamW."
    )


def is_shard(parameter: Any) -> bool:
    """Return True if this rank holds a part of a parameter only."""
    return isinstance(parameter, DTensor) and not all(
        isinstance(placement, Replicate) for placement in parameter.placements
    )


def optimizer_state(
    optimizer: Optimizer, owned: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], Scalars]:
    """Return the optimizer's state as (tensors, scalars), so that no pickle is needed.

    A tensor is `name.key`. If the optimizer takes a tensor apart, the parts are `name.key.part`.

    Raises: CheckpointError: state of another kind.
    """
    check_state_is_held(optimizer)
    name_local_state(optimizer)
    tensors: dict[str, Tensor] = {}
    scalars: Scalars = {}
    for name, parameter in owned.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            parts: dict[str, Tensor] = {}
            if isinstance(value, Tensor) and isinstance(optimizer, QuantizedOptimizer):
                parts = optimizer.shard_state(parameter, key, value)
            # Scalars are kept apart from tensors, because JSON holds them.
            if parts:
                tensors |= {f"{name}.{key}.{part}": tensor for part, tensor in parts.items()}
            elif isinstance(value, Tensor) and not is_made_of_tensors(to_local(value)):
                tensors[f"{name}.{key}"] = value
            elif value is None or isinstance(value, (bool, int, float)):
                scalars.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} under '{key}' for "
                    f"{name}; only plain tensors and numbers can be saved without pickle. For "
                    "8-bit states use shoal.optim.AdamW8bit."
                )
    return tensors, scalars


def check_state_is_held(optimizer: Optimizer) -> None:
    """Raise CheckpointError if `state_dict()` has what is neither state of a parameter nor a
    group's setting: a run that is resumed would begin it anew.
    """
    with access_by_shoal():
        given = optimizer.state_dict()
    lost = {*given} - {"state", "param_groups"}
    for index, parameter in enumerate(params_of(optimizer)):
        held = optimizer.state.get(parameter, {})
        lost |= {key for key in given.get("state", {}).get(index, {}) if key not in held}
    if lost:
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() has {listed(sorted(map(str, lost)), 3)}, "
            "which a checkpoint would not hold: it has self.state[parameter] (tensors and numbers) "
            "and the numbers of param_groups. Keep it there, or in an object with state_dict and "
            "load_state_dict that run.checkpoint(directory, name=object) is given."
        )


def load_optimizer_state(
    optimizer: Optimizer,
    owned: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    scalars: Scalars,
) -> None:
    """Load what `optimizer_state` returned, into the layout that parameters have now.

    Args: tensors, scalars: of owned parameters alone.

    Raises: CheckpointError: state for another optimizer.
    """
    name_local_state(optimizer)
    by_name: dict[str, dict[str, Any]] = {name: dict(values) for name, values in scalars.items()}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, key, part = split_state_key(path, owned)
        parts.setdefault((name, key), {})[part] = tensor
    for (name, key), tensors_of_key in parts.items():
        value = _join_parts(optimizer, owned[name], key, tensors_of_key)
        by_name.setdefault(name, {})[key] = value
    # Through `load_state_dict`, which optimizers may override, with indices as torch counts them.
    with access_by_shoal():
        state = optimizer.state_dict()
    index = {id(p): i for i, p in enumerate(params_of(optimizer))}
    state["state"] = {index[id(owned[name])]: values for name, values in by_name.items()}
    with torch.no_grad(), access_by_shoal():
        optimizer.load_state_dict(state)
    # torch casts floating state to the parameter's dtype. Some state has another dtype by design,
    # such as the mu_product of NAdam.
    for name, values in by_name.items():
        loaded = optimizer.state[owned[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def split_state_key(path: str, owned: Mapping[str, nn.Parameter]) -> tuple[str, str, str]:
    """Return parameter, key and part of a name of `optimizer_state`; part "" of a whole tensor."""
    name, _, key = path.rpartition(".")
    outer, _, inner = name.rpartition(".")
    return (outer, inner, key) if name not in owned and outer in owned else (name, key, "")


def _join_parts(
    optimizer: Optimizer, parameter: Tensor, key: str, parts: dict[str, Tensor]
) -> Tensor:
    # A plain tensor has one part, whose name is empty.
    if isinstance(optimizer, QuantizedOptimizer):
        return optimizer.unshard_state(parameter, key, parts)
    if "" not in parts:
        raise CheckpointError(
            f"the checkpoint holds '{key}' in 8 bits, and this optimizer is "
            f"{type(optimizer).__name__}. Use AdamW8bit, which saved it, or start afresh."
        )
    return parts[""]


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers of each group, such as `lr`, and sequences of them, such as `betas`."""
    return [
        {k: _plain(value) for k, value in group.items() if k != "params" and _is_number(value)}
        for group in optimizer.param_groups
    ]


def load_group_settings(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Load what `group_settings` returned."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        rate = group["lr"]
        for key, value in saved.items():
            # Some optimizers take the learning rate as a tensor, so that a compiled step is not
            # compiled again for each value.
            as_tensor = isinstance(rate, Tensor) and key in ("lr", "initial_lr")
            numbers = tuple(value) if isinstance(value, list) else value
            group[key] = torch.full_like(rate, value) if as_tensor else numbers


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def check_keeps_no_tensors(
    optimizer: Optimizer, groups: list[list[str]], owned: Mapping[str, nn.Parameter]
) -> None:
    """Raise StrategyRefused if an optimizer that is to be bound anew keeps tensors elsewhere.

    Args:
        groups: for each of its groups, the names of its parameters.
        owned: the parameters that this rank owns, by name.
    """
    named = [
        (name, parameter)
        for group, names in zip(optimizer.param_groups, groups, strict=True)
        for name, parameter in zip(names, group["params"], strict=True)
    ]
    replaced = {id(old) for name, old in named if owned.get(name) is not old}
    # Those of torch have checks of their own: LBFGS keeps a list of its parameters.
    if not replaced or type(optimizer).__module__.startswith("torch.optim"):
        return
    shapes = [parameter.shape for _, parameter in named]
    for key, value in _attributes(optimizer):
        tensors = list(_tensors_in(value, optimizer, _DEEPEST))
        holds_copies = len(tensors) > 0 and [tensor.shape for tensor in tensors] == shapes
        if holds_copies or any(id(tensor) in replaced for tensor in tensors):
            what = "a tensor for each parameter" if holds_copies else "the parameters"
            raise StrategyRefused(
                f"{type(optimizer).__name__} keeps {what} in an attribute of its own, '{key}', "
                "since before run.prepare, and this strategy replaces the parameters by those "
                "that this rank owns. Let it read the parameters from self.param_groups in each "
                "step, and keep what belongs to one in self.state[parameter], made in the first "
                "step; or use ddp."
            )


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an optimizer that binding does not reach."""
    for key, value in vars(optimizer).items():
        if key not in _BOUND and not key.startswith("_optimizer_"):
            yield key, value


def _tensors_in(value: Any, owner: Optimizer, depth: int) -> Iterator[Tensor]:
    """Yield the tensors of a nest; of another optimizer, those that it does not share."""
    if isinstance(value, Tensor):
        yield value
    if depth == 0 or value is owner:
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, Optimizer):
        shared = {id(group) for group in owner.param_groups}
        groups = [group["params"] for group in value.param_groups if id(group) not in shared]
        value = [*groups, *(inner for _, inner in _attributes(value))]
    elif not isinstance(value, (list, tuple)):
        return
    for inner in value:
        yield from _tensors_in(inner, owner, depth - 1)
