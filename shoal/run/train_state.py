"""The state of a run that can be saved: the model alone, or all that later steps depend on.

The model alone is written as a file of its tensors, or in the form of its own library, such as
transformers or peft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint import shard_format
from shoal.comm.assembly import gather_named_tensors, gather_named_values
from shoal.comm.mesh import Mesh
from shoal.comm.norm import full_tensor, to_local
from shoal.comm.tensor_digest import as_bytes
from shoal.data.fingerprint import difference
from shoal.data.seeds import load_random_state, random_state
from shoal.errors import CheckpointError, UsageError
from shoal.platform.files import atomic_write
from shoal.run import optimizer_binding
from shoal.run.optimizer_binding import listed, params_of
from shoal.run.preparation import named_models
from shoal.run.prepared import Prepared
from shoal.run.state_access import access_by_shoal
from shoal.strategies.base import LocalModel


class TrainState:
    """All that steps depend on and change; see `Run.state`.

    The names of the tensors begin with `model.`, `optimizer.` or `strategy.`.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.local_model = prepared.local_model()
        self.optimizers = prepared.optimizers
        self.loaders = prepared.loaders
        self.loss_scale = prepared.settings.loss_scale
        self.mesh = prepared.mesh

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """Return (tensors, info, private). Collective; all ranks must hold the same weights."""
        local_model, strategy_state = self.local_model, self.local_model.strategy_state
        strategy_state.pull_state(self.optimizers[0])
        self.mesh.data.broadcast_buffers(local_model.module)
        tensors = {f"model.{name}": value for name, value in tensors_of(local_model.module).items()}
        # A tied parameter that two stages own is saved once.
        saved_params = {
            name: parameter
            for name, parameter in local_model.trainable_params.items()
            if name not in local_model.pipeline.duplicated_params
        }
        optimizer_tensors: dict[str, Tensor] = {}
        scalars: optimizer_binding.Scalars = {}
        for optimizer in self.optimizers:
            stepped = _stepped_by(optimizer, saved_params)
            more, more_scalars = optimizer_binding.optimizer_state(optimizer, stepped)
            optimizer_tensors |= {f"optimizer.{name}": value for name, value in more.items()}
            scalars |= more_scalars
        is_local = strategy_state.has_rank_local_optimizer
        tensors |= (
            _broadcast_copies(optimizer_tensors, self.mesh) if is_local else optimizer_tensors
        )
        tensors |= {f"strategy.{n}": value for n, value in strategy_state.state_dict().items()}
        private = random_state(self.mesh.device) | strategy_state.rank_state_dict()
        if is_local:
            private |= optimizer_tensors
        # All state that is no tensor, as JSON values.
        info: dict[str, Any] = {
            "optimizer": gather_named_values(local_model.pipeline.axis, scalars),
            "groups": [g for o in self.optimizers for g in optimizer_binding.group_settings(o)],
            "model_ranks": self._model_ranks(),
            "tied": self._tied(),
        }
        positions = [loader.state_dict() for loader in self.loaders]
        if positions:
            info["data"] = positions[0]
            info["data_fingerprints"] = [dict(loader.data_fingerprint) for loader in self.loaders]
        if len(positions) > 1:
            info["more_data"] = positions[1:]
        if self.loss_scale is not None:
            info["loss_scale"] = self.loss_scale.state()
        return tensors, info, private

    def load(
        self, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
    ) -> list[str]:
        """Load what `state` returned. Collective; call `wait` of the strategy's state before.

        Returns: sentences about state that could not be used.
        """
        strategy_state = self.local_model.strategy_state
        weights, module = _strip_prefix("model.", tensors), self.local_model.module
        with access_by_shoal():
            if self.local_model.is_partial:  # those of the layers that this rank holds
                weights = {name: weights[name] for name in module.state_dict() if name in weights}
            module.load_state_dict(weights)
        self._load_optimizer(tensors, info, private)
        strategy_state.push_state(self.optimizers[0])
        positions = [info["data"]] if "data" in info else []
        positions += info.get("more_data", [])
        for loader, position in zip(self.loaders, positions, strict=False):
            loader.load_state_dict(position)
        if self.loss_scale is not None and "loss_scale" in info:
            self.loss_scale.load(info["loss_scale"])
        # Those that compute one model together draw alike, and others do not.
        is_own = private and info.get("model_ranks") == self._model_ranks()
        notes = load_random_state(private, self.mesh.device) if is_own else []
        return notes + strategy_state.load_state_dict(_strip_prefix("strategy.", tensors), private)

    def _tied(self) -> dict[str, str]:
        """Return a further name of a tied parameter -> the first one. Collective."""
        first: dict[int, str] = {}
        with access_by_shoal():
            named = [*self.local_model.module.named_parameters(remove_duplicate=False)]
        firsts = {name: first.setdefault(id(parameter), name) for name, parameter in named}
        pipeline = self.local_model.pipeline
        firsts |= pipeline.tied_names
        tied = {name: whole for name, whole in firsts.items() if name != whole}
        of_stages = [tied] if pipeline.axis is None else pipeline.axis.all_gather_json(tied)
        return {name: whole for tied in of_stages for name, whole in tied.items()}

    def _model_ranks(self) -> list[int]:
        return [self.mesh.tensor.size, self.mesh.pipeline.size]

    def check_info(self, info: Mapping[str, Any]) -> str:
        """Return in which way the data sets differ from the saved ones; empty if they do not.

        Raises: CheckpointError: `info` is not what `state` returns, or of other groups.
        """
        missing = [name for name in ("optimizer", "groups") if name not in info]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {' and '.join(missing)}: another version of Shoal wrote it."
            )
        saved_groups = len(info["groups"])
        groups = sum(len(optimizer.param_groups) for optimizer in self.optimizers)
        if saved_groups != groups:
            raise CheckpointError(
                f"the checkpoint has the settings of {saved_groups} parameter groups, and there "
                f"are {groups} here. Make the groups of the saved run first, those of "
                "add_param_group too; or load the weights alone, and start afresh."
            )
        saved = info.get("data_fingerprints", [])
        pairs = zip(saved, self.loaders, strict=False)
        problems = [difference(before, loader.data_fingerprint) for before, loader in pairs]
        return "; ".join(filter(None, problems))

    def _load_optimizer(
        self, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
    ) -> None:
        """Load the optimizer's settings, and its state of the layers that this rank holds."""
        owned = self.local_model.trainable_params
        state = _strip_prefix("optimizer.", tensors)
        scalars = info["optimizer"]
        if self.local_model.strategy_state.has_rank_local_optimizer:
            state |= _strip_prefix("optimizer.", private)
        name_of = {path: optimizer_binding.split_state_key(path, owned)[0] for path in state}
        unknown = sorted({*name_of.values(), *scalars} - owned.keys())
        if unknown and not self.local_model.is_partial:  # else other stages have them
            raise CheckpointError(
                f"the checkpoint holds optimizer state of {listed(unknown)}, which the model lacks."
            )
        groups = iter(info["groups"])
        for optimizer in self.optimizers:
            stepped = _stepped_by(optimizer, owned)
            optimizer_binding.load_optimizer_state(
                optimizer,
                stepped,
                {path: tensor for path, tensor in state.items() if name_of[path] in stepped},
                {name: values for name, values in scalars.items() if name in stepped},
            )
            settings = list(islice(groups, len(optimizer.param_groups)))
            optimizer_binding.load_group_settings(optimizer, settings)


def _stepped_by(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the owned parameters that an optimizer steps."""
    ids = {id(parameter) for parameter in params_of(optimizer)}
    return {name: parameter for name, parameter in owned.items() if id(parameter) in ids}


def layout_of(local_model: LocalModel) -> Callable[[str], Tensor | None]:
    """Return a function from a name in the tensors of `TrainState.state` to a tensor like it.

    State of the optimizer, and a moving average, is laid out as its parameter is. The function
    returns None for a name of which this rank holds nothing.
    """
    owned = local_model.trainable_params
    with access_by_shoal():
        state = local_model.module.state_dict()
    weights = {f"model.{name}": value for name, value in state.items()}
    # A moving average has the full model's name of a tied parameter, this stage has another one.
    weights |= {
        f"model.{full_name}": weights[f"model.{name}"]
        for name, full_name in local_model.pipeline.tied_names.items()
    }

    def layout(name: str) -> Tensor | None:
        if name.startswith("ema."):
            name = f"model.{name.removeprefix('ema.')}"
        if name in weights or not name.startswith("optimizer."):
            return weights.get(name)
        key = name.removeprefix("optimizer.")
        return owned.get(optimizer_binding.split_state_key(key, owned)[0])

    return layout


def full_state_dict(local_model: LocalModel) -> dict[str, Tensor]:
    """Return the full model's `state_dict`. Collective; all ranks must hold the same weights."""
    axis = local_model.pipeline.axis
    gathered = gather_named_tensors(
        axis,
        {name: full_tensor(value) for name, value in tensors_of(local_model.module).items()},
    )
    state = {name: value for name, value in gathered.items() if value is not None}
    # Stages that share a tied weight have a copy each.
    for tied in () if axis is None else axis.all_gather_json(dict(local_model.pipeline.tied_names)):
        state |= {
            name: state[first] for name, first in tied.items() if {name, first} <= state.keys()
        }
    if (full_model := local_model.pipeline.full_model) is not None:
        # Stages hold a module that stands at several places under one of its names.
        for name, first_name in full_model.second_names.items():
            if first_name in state:
                state.setdefault(name, state[first_name])
    return state


def save_model(local_model: LocalModel, mesh: Mesh, path: str | Path) -> None:
    """Write the full model's `state_dict` to a file, all of it or nothing.

    Collective; all ranks must hold the same weights.

    Raises: CheckpointError: on every rank, if it cannot be written.
    """
    state = whole_on_rank_zero(local_model, mesh)
    write_on_rank_zero(mesh, path, lambda: _write_file(state, Path(path)))


def whole_on_rank_zero(local_model: LocalModel, mesh: Mesh) -> dict[str, Tensor]:
    """Return the full model's `state_dict` on rank 0, and less on others. Collective."""
    mesh.data.broadcast_buffers(local_model.module)
    if local_model.is_partial:
        return full_state_dict(local_model)
    state = {}
    by_place: dict[Any, Tensor] = {}  # tied weights stay one tensor
    # One tensor at a time, so that no rank but 0 ever has room for the full model.
    for name, value in tensors_of(local_model.module).items():
        full = full_tensor(value)
        if mesh.rank == 0:
            held = to_local(value)
            place = (held.data_ptr(), held.shape, held.stride()) if held.numel() else name
            state[name] = by_place.setdefault(place, full.cpu() if full is not value else value)
    return state


def write_on_rank_zero(mesh: Mesh, path: str | Path, write: Callable[[], None]) -> None:
    """Write files on rank 0. Collective.

    Raises: CheckpointError: on every rank, if it failed.
    """
    outcome = ""
    if mesh.rank == 0:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            outcome = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if outcome := mesh.all_gather_str(outcome)[0]:
        raise CheckpointError(f"the model was not saved in {path}: {outcome}")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return this rank's `state_dict`. Raise CheckpointError if it holds anything but tensors."""
    with access_by_shoal():
        state = module.state_dict()
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise CheckpointError(
            f"{', '.join(other)}: extra state that is no tensor cannot be saved without pickle."
        )
    return state


def _broadcast_copies(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return copies of the first rank's tensors, on every rank. Collective.

    A run that goes on with another number of ranks starts from these.
    """
    copies = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().to(mesh.device, copy=True).contiguous()
        mesh.data.broadcast_tensor(copy)
        copies[name] = copy
    return copies


def _write_file(state: dict[str, Tensor], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target, survives="file") as file:
        if target.suffix == ".safetensors":
            _write_safetensors(state, file)
        else:
            torch.save(state, file)


def _write_safetensors(state: Mapping[str, Tensor], file: IO[bytes]) -> None:
    """Write tensors one after the other, without a copy of all; tied ones under each name."""
    unknown = {value.dtype for value in state.values()} - shard_format.NAMES.keys()
    if unknown:
        raise ValueError(f"the safetensors format does not know {', '.join(map(str, unknown))}")
    shapes = {name: (value.dtype, value.shape) for name, value in state.items()}
    head, starts, _ = shard_format.header(shapes, {"format": "pt"})
    file.write(head)
    for name in starts:
        file.write(as_bytes(state[name].detach().cpu()).numpy().data)


def _strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def choose_pretrained(
    models: Sequence[nn.Module], wanted: nn.Module | None
) -> tuple[str, nn.Module]:
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
    return prefix, model


def save_pretrained(
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
    state = _strip_prefix(prefix, whole_on_rank_zero(local_model, mesh))

    def write() -> None:
        with access_by_shoal():  # it may look at the model too, of which this is a part
            model.save_pretrained(directory, state_dict=state, **options)

    write_on_rank_zero(mesh, directory, write)
