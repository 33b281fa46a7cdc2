"""The state of a run: its place among the ranks, the weights, and all that later steps depend on.

These are methods of `Run`, which computes steps beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shoal.checkpoint import Checkpoints
from shoal.comm.assembly import unshared
from shoal.errors import CollectiveFailed, DataError, UsageError, headline_of
from shoal.loggers.script_log import ScriptLog
from shoal.run import train_state
from shoal.run.checks import check_path, check_state
from shoal.run.collective_calls import CollectiveCalls
from shoal.run.ema import Ema
from shoal.run.loop_progress import LoopProgress
from shoal.run.optimizer_binding import check_state_is_held
from shoal.run.preparation import is_loader
from shoal.run.prepared import Prepared
from shoal.run.run_checkpoints import RunCheckpoints
from shoal.strategies import base
from shoal.strategies.state import RemoteOptimizer
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


class StatefulRun:
    """A run whose state can be read, saved and loaded.

    Attributes: mesh: all ranks, their axes and process groups.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.mesh = prepared.mesh
        self._prepared = prepared
        # The calls are known until the process ends, and keep no run of it alive.
        alone = WeakMethod(self._steps_alone)
        self._calls = CollectiveCalls(prepared.mesh, lambda: bool((ask := alone()) and ask()))
        self._script_log = ScriptLog(prepared.mesh, prepared.announce)
        self._ema: Ema | None = None
        prepared.guards.at = self._calls.during

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.mesh.size

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its host, from 0."""
        return self.mesh.place.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this rank's model and batches."""
        return self.mesh.device

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only. The arguments are those of Python's `print`."""
        if self.rank == 0:
            print(*values, **options)

    @contextmanager
    def main_first(self, local: bool = False) -> Iterator[None]:
        """Return a context that rank 0 leaves before the others enter. Collective.

            with run.main_first():
                dataset = MNIST("data", download=True)  # rank 0 downloads, others find the files

        The other ranks wait for at most ten times the limit of a hang.

        Args: local: the first rank of each host goes first, for files on a disk of each host.

        Raises: CollectiveFailed: on the ranks that wait, if the block has failed on the first one.
        """
        if (self.local_rank if local else self.rank) != 0:
            with own_progress().during(Phase.SAVE):
                failures = list(filter(None, self.mesh.all_gather_str("")))
            if failures:
                raise CollectiveFailed(f"run.main_first: the first rank has failed: {failures[0]}")
            yield
            return
        failure = ""
        try:
            with own_progress().during(Phase.SAVE):
                yield
        except BaseException as error:
            failure = headline_of(error) or type(error).__name__
            raise
        finally:
            self.mesh.all_gather_str(failure)

    def weights(self) -> dict[str, Tensor]:
        """Return the full model's `state_dict`, under the model's own names. Collective.

        Buffers are those of rank 0, as in the file that `save` writes. The tensors are copies,
        which later steps leave as they are.
        """
        local_model = self._local_model()
        with self._calls.during("run.weights"):
            self.synchronize()
            self._prepared.guards.check_equal_weights()
            self.mesh.data.broadcast_buffers(local_model.module)
            full = train_state.full_state_dict(local_model)
        return unshared(full, train_state.tensors_of(local_model.module).values())

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, under the full model's names. Shards are DTensors."""
        local_model = self._local_model()
        return {
            local_model.pipeline.tied_names.get(name, name): parameter
            for name, parameter in local_model.module.named_parameters()
        }

    def wait(self) -> None:
        """Wait until this rank holds the weights of the last step, before you read parameters.

        The model's next forward pass waits by itself. Only parameter servers leave work behind.
        """
        self._local_model().strategy_state.wait()

    def synchronize(self) -> bool:
        """Wait until all ranks hold the same weights, those of all steps. Collective.

        Weights differ between ranks between the steps of parameter servers with staleness, and
        between the averaging steps of `local` and `diloco`. `evaluate`, `save`, `state` and
        `weights` call this first.

        Returns: True if the weights differed.
        """
        self._calls.check_all_failed()
        differed = self._local_model().strategy_state.synchronize()
        if differed and self._ema is not None:
            self._ema.broadcast(self.mesh)
        return differed

    def save(self, path: str | Path) -> None:
        """Write the full model's `state_dict` to a file. Collective.

        The file has the model's own names, and is replaced in one piece or not at all. A path that
        ends in .safetensors is written in that format, for `safetensors.torch.load_file(path)`; any
        other as `torch.save` does, for `torch.load(path, weights_only=True)`.

        Raises: CheckpointError: on every rank, if it cannot be written.
        """
        check_path("run.save", path)
        local_model = self._local_model()
        with self._calls.during("run.save"):
            self.synchronize()
            self._prepared.guards.check_equal_weights()
            train_state.save_model(local_model, self.mesh, path)

    def save_pretrained(
        self, directory: str | Path, model: nn.Module | None = None, **options: Any
    ) -> None:
        """Write a model of transformers, peft or their kind in its library's form. Collective.

        Rank 0 calls `model.save_pretrained(directory, state_dict=..., **options)` with the whole
        weights, and `Class.from_pretrained(directory)` reads them.

        Args:
            model: a prepared model; needed where several have a method `save_pretrained`.
            options: for that method, such as `max_shard_size="2GB"`.

        Raises:
            UsageError: no prepared model has the method, or it takes no `state_dict`.
            CheckpointError: on every rank, if it failed.
        """
        check_path("run.save_pretrained", directory)
        local_model = self._local_model()
        prefix, chosen = train_state.choose_pretrained(self._prepared.models, model)
        with self._calls.during("run.save_pretrained"):
            self.synchronize()
            self._prepared.guards.check_equal_weights()
            train_state.save_pretrained(chosen, prefix, local_model, self.mesh, directory, options)

    def checkpoint(self, directory: str | Path, keep: int = 3, **objects: Any) -> RunCheckpoints:
        """Return the checkpoints of this run in a directory that all ranks can reach.

            checkpoint = run.checkpoint("checkpoints", keep=3, scheduler=scheduler)
            step = checkpoint.resume()  # 0 in the first run
            ...
            checkpoint.save(step)  # all ranks

        Args:
            keep: the newest checkpoints that stay.
            objects: the script's own objects whose state belongs to the run, by name; each has
                `state_dict` and `load_state_dict`, or is a dict, and is the same on every rank.

        Raises:
            UsageError: an object is none of these; `keep` is below 1.
            CheckpointError: an optimizer has state that a checkpoint does not hold.
        """
        check_path("run.checkpoint", directory)
        for optimizer in self._prepared.optimizers:
            check_state_is_held(optimizer)
        checkpoints = Checkpoints(Path(directory), keep)
        return RunCheckpoints(self, checkpoints, objects, self._prepared.announce)

    def state_dict(self) -> dict[str, Any]:
        """Return what `state` returns, as one dict. Collective."""
        tensors, info, private = self.state()
        return {"tensors": tensors, "info": info, "private": private}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Collective; call it after `prepare`.

        Raises: as `load_state`.
        """
        parts: list[Any] = [state.get(name) for name in ("tensors", "info", "private")]
        self.load_state(*parts)

    def state(
        self, copies: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """Return what the rest of the run depends on: (tensors, info, private). Collective.

        `tensors` are the same on every rank, `info` consists of JSON values, `private`
        is this rank's random state. After `load_state` the run goes on bit for bit at the same
        number of ranks. The script's own objects are not in it: save a learning-rate scheduler by
        its `state_dict()`.

        Args:
            copies: False returns this run's own tensors, which the next step changes: enough for
                writing them at once, without the memory of copies.

        Raises:
            TrainingDiverged: on every rank, a weight is NaN or infinite; not with
                `nonfinite="ignore"`.
        """
        resumable = self._train_state()
        self.synchronize()
        self._prepared.nonfinite_steps.check_weights()
        self._prepared.guards.check_equal_weights()
        tensors, info, private = resumable.state()
        if self._ema is not None:
            tensors |= self._ema.state()
        if copies:
            tensors = unshared(tensors, tensors.values())
            private = unshared(private, private.values())
        return tensors, info | {"optimizer_steps": self._prepared.optimizer_steps}, private

    def layout_of(self) -> Callable[[str], Tensor | None]:
        """Return a function from a name in `state`'s tensors to this rank's tensor, or None.

        From it, `Checkpoints.load` knows which shard of a tensor this rank needs to read.
        """
        return train_state.layout_of(self._local_model())

    def load_state(
        self,
        tensors: Mapping[str, Tensor],
        info: Mapping[str, Any],
        private: Mapping[str, Tensor],
        accept_data: bool = False,
    ) -> list[str]:
        """Load what `state` returned. Collective; call it after `prepare`.

        Args:
            private: this rank's own; empty if the number of ranks has changed.
            accept_data: go on although the data set has shrunk, grown or changed. The position in
                the epoch stays the same number of samples.

        Returns: sentences about data that has changed, and about state that was lost with a change
            of the number of ranks.

        Raises: DataError: the data set of a prepared loader is not the one of the saved run.
        """
        check_state(tensors, info, private)
        resumable = self._train_state()
        change = resumable.check_info(info)
        if change and not accept_data:
            raise DataError(
                f"{change}. Some samples of the epoch would come twice, and others never. Restore "
                "the data, begin a new run, or accept it: checkpoint.resume(accept_data=True), "
                "run.load_state(..., accept_data=True), --train.accept_data changed."
            )
        self.wait()
        notes = resumable.load(tensors, info, private)
        if self._ema is not None:
            notes += self._ema.load(tensors)
        self._prepared.guards.accept_weights()
        self._prepared.optimizer_steps = int(info.get("optimizer_steps", 0))
        return [f"{change}; accepted", *notes] if change else notes

    def log_to(
        self,
        *loggers: str,
        directory: str | Path | None = None,
        step: int | None = None,
        **settings: Any,
    ) -> None:
        """Open loggers for `log`. Collective.

            run.log_to("wandb", directory="runs/first", lr=0.1)

        Args:
            loggers: "jsonl", "tensorboard", "wandb", "mlflow", "trackio".
            directory: of the run; their files lie in it, and it gives the run its name. By default
                a new one in runs/, with the name of the script and the time.
            step: from which a run goes on, as `checkpoint.resume()` returns it, 0 too, where a job
                was lost before its first checkpoint; measurements of later steps are written again.
            settings: to be shown beside the measurements.

        Raises:
            UsageError: there is no such logger, or its package is not installed; the directory has
                the measurements of another run, and there is no `step`.
        """
        with self._calls.during("run.log_to"):
            self._script_log.open(loggers, directory, step, settings)

    def log(
        self, values: Mapping[str, float | Tensor], step: int | None = None, kind: str = "train"
    ) -> dict[str, float]:
        """Write measurements of a step: their means over all ranks. Collective.

            run.log({"loss": loss, "lr": schedule.get_last_lr()[0]})

        Args:
            values: single numbers by name, the same names on all ranks. Each waits for the device.
            step: by default the steps that the first optimizer has made, before a resume too.
            kind: with which the names begin, as in train/loss.

        Returns: the means, the same on every rank.
        Raises: UsageError: no logger was opened; a value is no single number.
        """
        with self._calls.during("run.log"):
            made = self._prepared.optimizer_steps
            return self._script_log.write(values, made if step is None else step, kind)

    def progress(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return the loader, with the progress of a loop over it shown on rank 0.

            for x, y in run.progress(loader):

        A bar on a terminal, and a line now and then elsewhere: the step, the loss that `log` was
        given last, and samples a second of all ranks.

        Raises: UsageError: it is no loader.
        """
        if not is_loader(loader):
            raise UsageError(
                f"run.progress takes a loader, and was given {type(loader).__name__}: for x, y in "
                "run.progress(loader)."
            )
        return LoopProgress(loader, lambda: self._script_log.last) if self.rank == 0 else loader

    def report(self) -> list[str]:
        """Return lines for the end of a run, such as the staleness that servers have measured."""
        return self._local_model().strategy_state.report()

    @property
    def remote(self) -> RemoteOptimizer | None:
        """The parameter servers, if they own the parameters; None if this process steps them."""
        return self._local_model().remote_optimizer

    @property
    def is_synchronous(self) -> bool:
        """True if all ranks take each step together, so that a step has global gradients."""
        return self._local_model().strategy_state.is_synchronous

    def _train_state(self) -> train_state.TrainState:
        self._local_model()  # raises where nothing is prepared, or a weight was written
        if not self._prepared.optimizers:
            raise UsageError("state: no optimizer was prepared, so there is no training state.")
        return train_state.TrainState(self._prepared)

    def _local_model(self) -> base.LocalModel:
        local_model = self._prepared.local_model()
        self._prepared.guards.check_weights()
        return local_model

    def _steps_alone(self) -> bool:
        """Return True if each rank steps by itself, so that one may leave out a step."""
        prepared = self._prepared
        return (
            prepared.step is not None and not prepared.local_model().strategy_state.is_synchronous
        )
