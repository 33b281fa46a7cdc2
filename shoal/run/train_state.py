"""What of a run is written down: the model as a file, and all that the rest of the run depends
on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.assembly import gather_named_tensors, gather_named_values
from shoal.comm.mesh import Mesh
from shoal.comm.norm import full_tensor
from shoal.data.loader import DistributedBatchLoader
from shoal.data.seeds import load_random_state, random_state
from shoal.errors import CheckpointError
from shoal.platform.files import atomic_write
from shoal.run import optimizer_binding
from shoal.strategies.base import LocalModel
from shoal.strategies.transforms.precision import LossScale


@dataclass(frozen=True)
class TrainState:
    """Everything that steps depend on and change: see `Run.state`."""

    part: LocalModel
    optimizer: Optimizer
    loader: DistributedBatchLoader | None
    loss_scale: LossScale | None
    mesh: Mesh

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """(tensors, info, private). Collective; the ranks hold the same weights."""
        part, kept = self.part, self.part.strategy_state
        kept.pull_state(self.optimizer)
        self.mesh.data.broadcast_buffers(part.module)
        tensors = {f"model.{name}": value for name, value in tensors_of(part.module).items()}
        counted = {
            name: parameter
            for name, parameter in part.trainable_params.items()
            if name not in part.duplicated_params
        }
        gathered, scalars = optimizer_binding.optimizer_state(self.optimizer, counted)
        held = {f"optimizer.{name}": value for name, value in gathered.items()}
        tensors |= _first_ranks(held, self.mesh) if kept.has_rank_local_optimizer else held
        tensors |= {f"strategy.{name}": value for name, value in kept.state_dict().items()}
        private = (
            random_state(self.mesh.device)
            | kept.rank_state_dict()
            | (held if kept.has_rank_local_optimizer else {})
        )
        return tensors, self._info(scalars), private

    def load(
        self, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
    ) -> list[str]:
        """The inverse of `state`; sentences about what could not be kept. Collective; this rank
        waits for no values.
        """
        part, kept = self.part, self.part.strategy_state
        part.module.load_state_dict(self._own_weights(tensors))
        self._load_optimizer(tensors, info, private)
        kept.push_state(self.optimizer)
        if self.loader is not None and "data" in info:
            self.loader.load_state_dict(info["data"])
        if self.loss_scale is not None and "loss_scale" in info:
            self.loss_scale.load(info["loss_scale"])
        if private:
            load_random_state(private)
        return kept.load_state_dict(_strip_prefix("strategy.", tensors), private)

    def _info(self, scalars: optimizer_binding.Scalars) -> dict[str, Any]:
        """Return JSON values: all that is no tensor. Collective."""
        groups = optimizer_binding.group_settings(self.optimizer)
        info: dict[str, Any] = {
            "optimizer": gather_named_values(self.part.pipeline_axis, scalars),
            "groups": groups,
        }
        if self.loader is not None:
            info["data"] = self.loader.state_dict()
        if self.loss_scale is not None:
            info["loss_scale"] = self.loss_scale.state()
        return info

    def _own_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the layers that this rank holds."""
        weights = _strip_prefix("model.", tensors)
        if not self.part.is_partial:
            return weights
        return {name: weights[name] for name in self.part.module.state_dict() if name in weights}

    def _load_optimizer(
        self, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
    ) -> None:
        """Load the optimizer's settings, and its state of the layers that this rank holds."""
        part, owned = self.part, self.part.trainable_params
        found, scalars = _strip_prefix("optimizer.", tensors), info["optimizer"]
        if part.strategy_state.has_rank_local_optimizer:
            found |= _strip_prefix("optimizer.", private)
        if part.is_partial:
            found = {
                path: t
                for path, t in found.items()
                if optimizer_binding.split_state_key(path, owned)[0] in owned
            }
            scalars = {name: values for name, values in scalars.items() if name in owned}
        optimizer_binding.load_optimizer_state(self.optimizer, owned, found, scalars)
        optimizer_binding.load_group_settings(self.optimizer, info["groups"])


def layout_of(part: LocalModel) -> Callable[[str], Tensor | None]:
    """How this rank holds what has a name in the tensors of `Resumable.state`."""
    held = {f"model.{name}": value for name, value in part.module.state_dict().items()}
    # An average has the whole model's name of what hangs here under another.
    held |= {f"model.{name}": held[f"model.{here}"] for here, name in part.tied_names.items()}

    def owner(name: str) -> Tensor | None:
        return part.trainable_params.get(
            optimizer_binding.split_state_key(
                name.removeprefix("optimizer."), part.trainable_params
            )[0]
        )

    return lambda name: held.get(name, owner(name) if name.startswith("optimizer.") else None)


def refuse_incomplete(info: Mapping[str, Any]) -> None:
    """Raise CheckpointError where `info` is not what `Resumable.state` gives."""
    lacking = [name for name in ("optimizer", "groups") if name not in info]
    if lacking:
        raise CheckpointError(
            f"the checkpoint lacks {' and '.join(lacking)}: another version of Shoal wrote it."
        )


def full_state_dict(part: LocalModel) -> dict[str, Tensor]:
    """The whole model's `state_dict`. Collective; the ranks hold the same weights."""
    found = gather_named_tensors(
        part.pipeline_axis,
        {name: full_tensor(value) for name, value in tensors_of(part.module).items()},
    )
    return {name: value for name, value in found.items() if value is not None}


def save_model(part: LocalModel, mesh: Mesh, path: str | Path) -> None:
    """Write the whole `state_dict`, all of it or nothing. Collective; the ranks hold the same
    weights.
    """
    mesh.data.broadcast_buffers(part.module)
    state = {}
    if part.pipeline_axis is not None:
        state = full_state_dict(part)
    for name, value in tensors_of(part.module).items() if part.pipeline_axis is None else ():
        full = full_tensor(value)  # one at a time: only rank 0 keeps them
        if mesh.rank == 0:
            state[name] = full.cpu() if full is not value else value
    if mesh.rank == 0:
        _write(state, Path(path))
    mesh.barrier()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Its `state_dict` as this rank holds it. Raises CheckpointError for what is no tensor."""
    state = module.state_dict()
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise CheckpointError(
            f"{', '.join(other)}: extra state that is no tensor cannot be saved without pickle."
        )
    return state


def _first_ranks(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Of what differs between ranks the first one's: what another number of ranks would go on
    from. Collective.
    """
    found = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().to(mesh.device, copy=True).contiguous()
        mesh.data.broadcast_tensor(copy)
        found[name] = copy
    return found


def _write(state: dict[str, Tensor], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target, survives="file") as file:
        torch.save(state, file)


def _strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
