"""Checkpoints of a run in two lines: `checkpoint.resume()` and `checkpoint.save(step)`.

It holds tensors by name, and JSON values. So the `state_dict()` of a script's own object, such as a
scheduler or a moving average, is taken apart:

    {"last_epoch": 3, "milestones": Counter({30: 1}), "average": tensor}

    tensors    "object.scheduler.average"
    JSON       {"mapping": [["last_epoch", 3], ["milestones", {"counter": [[30, 1]]}],
                            ["average", {"tensor": "object.scheduler.average"}]]}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.checkpoint import Checkpoints
from shoal.checkpoint.manifest import name_of
from shoal.comm.tensor_digest import tensor_digest
from shoal.errors import CleanupFailed, UsageError

if TYPE_CHECKING:
    from shoal.run.stateful_run import StatefulRun

OBJECTS = "objects"
"""The name of the objects' state among the JSON values of a checkpoint."""
PREFIX = "object."
"""Begins the names of these tensors, which `Run.state` uses for none of its own."""
_PLAIN = (bool, int, float, str)


class RunCheckpoints:
    """The checkpoints of a run and of the script's own objects, in one directory.

    `Run.checkpoint` makes it.

    Args:
        objects: by name; each is a dict, or has `state_dict` and `load_state_dict`.
        announce: prints a note, on rank 0.

    Raises: UsageError: an object is none of these.
    """

    def __init__(
        self,
        run: StatefulRun,
        checkpoints: Checkpoints,
        objects: Mapping[str, Any],
        announce: Callable[[str], None],
    ) -> None:
        without = [
            f"{name} is a {type(value).__name__}"
            for name, value in objects.items()
            if not isinstance(value, dict)
            and not all(
                callable(getattr(value, call, None)) for call in ("state_dict", "load_state_dict")
            )
        ]
        if without:
            raise UsageError(
                f"run.checkpoint: {', '.join(without)}, without state_dict() and "
                "load_state_dict(). Give it objects that have both, such as a scheduler or an "
                "AveragedModel, or a dict of numbers: best = {'accuracy': 0.0}."
            )
        self._run = run
        self._checkpoints = checkpoints
        self._objects = dict(objects)
        self._announce = announce

    def resume(self, accept_data: bool = False) -> int:
        """Load the newest checkpoint that verifies, if there is one. Collective.

        Call it after `prepare`, and before the loop. The loader goes on at its sample:
        `loader.epoch` says in which epoch.

        Args: accept_data: go on although the data set has shrunk, grown or changed.

        Returns: the step that it was saved with; 0 if nothing was ever saved.
        Raises:
            CheckpointError: on every rank; there are checkpoints, and none verifies.
            DataError: the data set is not the one of the saved run.
        """
        saved = self._checkpoints.load(self._announce, like=self._run.layout_of())
        if saved is None:
            return 0
        notes = self._run.load_state(saved.tensors, saved.info, saved.private, accept_data)
        held: Mapping[str, Any] = saved.info.get(OBJECTS, {})
        for name in self._objects.keys() & held.keys():
            own, state = self._objects[name], put_together(held[name], saved.tensors)
            (own.update if isinstance(own, dict) else own.load_state_dict)(state)
        missing = [name for name in self._objects if name not in held]
        notes += [f"the checkpoint holds no state of {name}" for name in missing]
        notes += [
            f"the checkpoint's state of {name} is unused: run.checkpoint(..., {name}=...) takes it"
            for name in held
            if name not in self._objects
        ]
        goes_on = (
            "; the loop over the loader begins behind its batches" if "data" in saved.info else ""
        )
        self._announce(f"resumed from {saved.path}{goes_on}")
        for note in notes:
            self._announce(f"note: {note}")
        return saved.step

    def save(self, step: int) -> Path:
        """Save a checkpoint, and remove those beyond `keep`. Collective.

        On return it is on the disk and was read back.

        Args: step: not negative, and above the step of every checkpoint in the directory.

        Returns: the checkpoint's directory.
        Raises:
            CheckpointError: on every rank, if it failed on any, as where the disk is full. Earlier
                checkpoints are still there, and training can go on.
            TrainingDiverged: on every rank; a weight is NaN or infinite.
            UsageError: an object's state differs between ranks, or cannot be saved.
        """
        tensors, info, private = self._run.state(copies=False)
        own: dict[str, Tensor] = {}
        held = {
            name: take_apart(v if isinstance(v, dict) else v.state_dict(), name, own)
            for name, v in self._objects.items()
        }
        for name, value in held.items():  # one rank's are saved
            digests = {
                key: int(tensor_digest(tensor))
                for key, tensor in own.items()
                if key.split(".")[1] == name
            }
            if not self._run.mesh.is_same([value, digests]):
                raise UsageError(
                    f"checkpoint.save: the state of {name} is not the same on all ranks, and a "
                    "checkpoint holds it once. Update it alike on all ranks, such as by the loss "
                    "that run.backward returns; or leave it out, and save it for each rank."
                )
        try:
            return self._checkpoints.save(step, tensors | own, info | {OBJECTS: held}, private)
        except CleanupFailed as error:
            self._announce(f"note: {error}")
            return self._checkpoints.directory / name_of(step)


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON values, and put its tensors into `tensors`.

    Args: name: of the state, with which the names of its tensors begin.

    Raises: UsageError: it holds a shard, or anything but tensors, numbers, texts and containers.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        tensors[PREFIX + name] = value
        return {"tensor": PREFIX + name}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "mapping"
        items = value.items()
        return {kind: [[_key(k, name), take_apart(v, f"{name}.{k}", tensors)] for k, v in items]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [take_apart(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    what = "a shard of a tensor" if isinstance(value, DTensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"run.checkpoint: {name} of its state_dict() is {what}; a checkpoint holds tensors, "
        "numbers, texts, lists and dicts, without pickle."
    )


def put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `take_apart` was given."""
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        items = [put_together(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    pairs = {key: put_together(item, tensors) for key, item in content}
    return pairs if kind == "mapping" else Counter(pairs)


def _key(key: Any, name: str) -> Any:
    if key is None or isinstance(key, _PLAIN):
        return key
    raise UsageError(
        f"run.checkpoint: {name} of its state_dict() has the key {key!r}, a {type(key).__name__}; "
        "keys are texts or numbers."
    )
