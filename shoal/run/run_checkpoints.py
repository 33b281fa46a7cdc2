"""Checkpoints of a run in two lines: `checkpoint.resume()` and `checkpoint.save(step)`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.checkpoint import Checkpoints
from shoal.checkpoint.manifest import name_of
from shoal.comm.tensor_digest import tensor_digest
from shoal.errors import CleanupFailed, UsageError
from shoal.run.batch_size import is_same_on_all
from shoal.run.object_state import check_objects, put_together, take_apart

if TYPE_CHECKING:
    from shoal.run.stateful_run import StatefulRun

OBJECTS = "objects"
"""The name of the objects' state among the JSON values of a checkpoint."""


class RunCheckpoints:
    """The checkpoints of a run and of the script's own objects, in one directory.

    `Run.checkpoint` makes it.

    Args:
        objects: by name; each has `state_dict` and `load_state_dict`.
        announce: prints a note, on rank 0.
    """

    def __init__(
        self,
        run: StatefulRun,
        checkpoints: Checkpoints,
        objects: Mapping[str, Any],
        announce: Callable[[str], None],
    ) -> None:
        check_objects(objects)
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
            self._objects[name].load_state_dict(put_together(held[name], saved.tensors))
        notes += [f"it holds no state of {name}" for name in self._objects if name not in held]
        notes += [f"its state of {name} is not used" for name in held if name not in self._objects]
        self._announce(f"resumed from {saved.path}")
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
            name: take_apart(value.state_dict(), name, own) for name, value in self._objects.items()
        }
        self._check_same_objects(held, own)
        try:
            return self._checkpoints.save(step, tensors | own, info | {OBJECTS: held}, private)
        except CleanupFailed as error:
            self._announce(f"note: {error}")
            return self._checkpoints.directory / name_of(step)

    def _check_same_objects(self, held: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
        """Raise UsageError on all ranks if the objects differ: one rank's are saved. Collective."""
        for name, value in held.items():
            digests = {
                key: int(tensor_digest(tensor))
                for key, tensor in own.items()
                if key.split(".")[1] == name
            }
            digest = sha256(json.dumps([value, digests]).encode()).digest()
            if self._run.mesh.size > 1 and not is_same_on_all(digest, self._run.mesh):
                raise UsageError(
                    f"checkpoint.save: {name}.state_dict() is not the same on all ranks, and a "
                    "checkpoint holds it once. Update it alike on all ranks, such as by the loss "
                    "that run.backward returns; or leave it out, and save it for each rank."
                )
