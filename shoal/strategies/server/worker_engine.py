"""One worker's steps through parameter servers, and its state for checkpoints.

run       the backward pass pushes each partition as soon as it has its gradients
          (`gradient_pusher.py`); with synchronous steps, the totals are summed after it
gather    the step request: learning rates and the like. A server steps a partition when it
          has the pushes and requests of all workers
forward   of the next step: each unit waits for the values that it reads (`value_waits.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shoal.comm.compression import parse
from shoal.comm.mesh import Mesh
from shoal.comm.norm import global_norm
from shoal.errors import StrategyRefused, UsageError
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.launcher import ClusterLauncher, report_servers, spans_machines
from shoal.parameter_server.node.event_log import Event
from shoal.parameter_server.optimizer_spec import OptimizerSpec, Settings, recipe_of, settings_of
from shoal.parameter_server.partitioning import param_metas, partition, partition_bytes
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.platform.step_closures import call_before_update
from shoal.platform.tensors import MIB
from shoal.strategies import SYNCHRONOUS, base
from shoal.strategies.base import Forward, ForwardOutput, LocalBatch, LocalModel, StepResult
from shoal.strategies.local_step import scaled_for_mean
from shoal.strategies.options import ServerOptions
from shoal.strategies.server.gradient_pusher import GradientPusher
from shoal.strategies.server.value_waits import ValueWaits
from shoal.strategies.state import StrategyState

RESIDUAL_PREFIX = "not_pushed."
"""Prefix of a parameter's name in checkpoints, for its residual. Here residuals are terms of a sum
over ranks. ddp's are terms of a mean and have another prefix, because a run may be resumed with
another strategy.
"""
RESIDUALS_LOST_MESSAGE = (
    "compress: the checkpoint has no residuals of error feedback for this number of workers: they "
    "begin at zero"
)


Connect = Callable[["WorkerEngine", OptimizerSpec], WorkerClient]


class WorkerEngine(StrategyState):
    """One worker's side of a run with parameter servers.

    It is the `RemoteOptimizer` of the local model, and its `StrategyState` too, because the servers
    have the optimizer's state.

    Args: connect: starts servers with the given optimizer, and returns a client of them. Called
        when `flat` is set. Collective.

    Attributes:
        staleness: steps that a worker may be ahead of the slowest one; None without a bound.
        factor: factor of the next step's gradients, by clipping for example.
        has_pushed: gradients are with the servers, which wait for the step request.
        leaves_out: the gradients that were pushed are to be dropped, and no step be taken.
        has_other_weights: workers have stepped asynchronously since the last `synchronize`.
        end: leaves the servers when the garbage collector finds this engine; None without servers.

    Raises: ConfigError: compress of an unknown kind.
    """

    def __init__(
        self, options: ServerOptions, model: LocalModel, mesh: Mesh, connect: Connect
    ) -> None:
        self.options = options
        self.remote_optimizer = self
        self.model = model
        self.mesh = mesh
        self._connect = connect
        self.staleness = None if options.staleness == "async" else int(options.staleness)
        self.compression = parse(options.compress)
        self.is_synchronous = self.staleness == 0
        self.factor = 1.0
        self.has_pushed = False
        self.leaves_out = False
        self.has_other_weights = False
        self.removed: Callable[[], list[str]] = list
        self.zeroed: Container[str] = ()
        self._without: list[str] = []
        self._settings: list[Settings] = []
        self.end: finalize[..., Any] | None = None
        self.launcher = ClusterLauncher(mesh)
        self.client: WorkerClient
        self.flat: FlatParams
        self.pusher: GradientPusher
        self.waits: ValueWaits

    # One step

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """Compute a micro-batch and its loss."""
        with self.waits.at_first_read():
            return self.model.forward(batch)

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute both passes of one micro-batch. The last one pushes partitions.

        Returns: totals of all ranks; of this rank if steps are asynchronous.
        """
        if self.leaves_out:
            self.gather()
        if self.has_pushed:
            raise UsageError(
                "forward_backward was called twice before optimizer.step(): the first gradients "
                "are with the servers. To add up parts of one batch use accumulate, and for "
                "several batches ddp; to leave a step out call optimizer.zero_grad() instead of "
                "optimizer.step(), on all ranks."
            )
        # An asynchronous push is a step of its own, by the mean over this worker's samples.
        num_ranks = 1 if self.is_synchronous else self.mesh.size
        self.pusher.begin(batch.is_last_microbatch)
        result = self.model.run(forward, scaled_for_mean(batch, num_ranks))
        if not batch.is_last_microbatch:
            return result
        self.pusher.finish(self.zeroed)
        self.has_pushed = True
        self.factor = 1.0
        totals = result.step_totals
        if not self.is_synchronous:
            totals[base.STOP] = float(self._is_last_step(batch.stop_requested))
        elif self.mesh.size > 1:
            # Summed here and not during the backward pass, which tells if gradients are finite: a
            # message of its own for that would wait for the slowest rank once more.
            totals[base.NONFINITE] = float(self.model.finite_check.found)
            dist.all_reduce(totals)
        return result

    def gather(self) -> None:
        """Request the step, or that it is left out. The next forward pass waits for new values,
        unit by unit.
        """
        if not self.has_pushed:
            return
        settings = self._settings or self._read_settings()
        self._settings = []
        if not self.is_synchronous:
            # The pushes of all workers together are one step of the full learning rate.
            for group in settings:
                group["lr"] = float(group["lr"]) / self.mesh.size  # type: ignore[arg-type]
        self.optimizer.state.clear()  # a copy that `pull_state` has made is old now
        self.client.request_step(StepRequest(settings, self.factor, self.leaves_out, self._without))
        self._without = []
        self.has_pushed = False
        self.leaves_out = False
        self.has_other_weights = not self.is_synchronous

    def _watch_zero_grad(self, optimizer: Optimizer) -> None:
        """Let `zero_grad()` drop the gradients that the servers have, as it does elsewhere."""
        zero_grad = optimizer.zero_grad

        @wraps(zero_grad)
        def zero_and_drop(*args: Any, **kwargs: Any) -> None:
            self.leaves_out = self.has_pushed
            zero_grad(*args, **kwargs)

        optimizer.zero_grad = zero_and_drop  # type: ignore[method-assign]

    def _read_settings(self) -> list[Settings]:
        if _members(self.optimizer) != self._groups:
            raise UsageError(
                "the optimizer's groups have other parameters than in run.prepare, and a server "
                "steps each parameter with the settings of its group of then. Give those that will "
                "have settings of their own a group before run.prepare, or use ddp or zero3."
            )
        return [settings_of(group) for group in self.optimizer.param_groups]

    def _before_update(self) -> None:
        """Note the settings of the step, and the gradients that it is to be without.

        The optimizer's own step has none here, and changes settings such as a count of steps.
        """
        self._settings = self._read_settings() if self.has_pushed else []
        self._without = self.removed() if self.has_pushed and not self.leaves_out else []

    def _is_last_step(self, stop_requested: bool) -> bool:
        """Return True after the step after which all workers stop.

        Workers are at different steps, so the servers choose that step.
        """
        self.wait()
        if stop_requested:
            self.client.request_stop()
        return 0 < self.client.stop_at <= self.client.step + 1

    # Optimizer and checkpoints

    def attach(self, optimizer: Optimizer) -> None:
        """Start the servers, and send them the parameters. Collective."""
        self.optimizer = optimizer
        self._groups = _members(optimizer)
        self._watch_zero_grad(optimizer)
        call_before_update(optimizer, self._before_update)
        recipe = recipe_of(optimizer)
        parameters = dict(self.model.trainable_params)
        metas = param_metas(parameters, optimizer)
        max_bytes = int(self.options.part_mb * MIB)
        one_machine = not spans_machines(self.mesh.place)
        size_bytes = partition_bytes(
            metas, self.options.servers, max_bytes, one_machine=one_machine
        )
        self.flat = FlatParams(parameters, partition(metas, size_bytes))
        self.client = self._connect(self, recipe)
        self.pusher = GradientPusher(
            self.client, self.flat, self.compression, self.model.finite_check
        )
        self.push_state(optimizer)
        self.pusher.register_hooks()
        self.waits = ValueWaits(self.model.module, self.client, self.flat, self.pusher.parts_of)
        self.waits.register_hooks()

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the full gradients that the servers have summed, by name. Collective.

        Parameters whose gradient the step does not use have None.
        """
        self._require_synchronous("gradients()")
        removed = self.removed()
        sums: dict[int, list[dict[str, Any]]] = {}
        for part in self.client.parts:
            values, present = self.client.gradient(part.number)
            sums[part.number] = [
                {"sum": values[s.offset : s.offset + s.length] * self.factor} if has_grad else {}
                for s, has_grad in zip(part.segments, present, strict=True)
            ]
        return {
            name: None if name in removed else self.flat.gather(name, sums).get("sum")
            for name in self.flat.parameters
        }

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of what `gradients` returns, float64. Collective."""
        self._require_synchronous("clip_gradients()")
        if norm_type == 2.0 and not self.removed():  # the servers know the squares
            norm = self.client.squared_norm() ** 0.5 * self.factor
            return torch.tensor(norm, dtype=torch.float64)
        gradients = [g.double() for g in self.gradients().values() if g is not None]
        return global_norm(gradients, norm_type).to(torch.float64)

    def scale(self, factor: Tensor | float) -> None:
        self.factor *= float(factor)

    def leave_out(self) -> None:
        self.leaves_out = self.has_pushed

    def wait(self) -> None:
        """Wait until all values of the last step are here."""
        self.client.wait(range(len(self.client.parts)))
        self.flat.copy_to_params(self.flat.parameters)

    def synchronize(self) -> bool:
        """Pull the newest values, which are the same on all workers. Collective.

        Returns: True if workers had different values.
        """
        if self.leaves_out:
            self.gather()
        self.wait()
        had_other_weights = self.has_other_weights
        self.has_other_weights = False
        if had_other_weights:
            self.mesh.barrier()
            self.client.pull()
            self.wait()
            # Else the first to continue would push while others still pull.
            self.mesh.barrier()
        return had_other_weights

    def report(self) -> list[str]:
        """Return the servers' statistics, for the end of a run. Called on one rank."""
        return report_servers(self.client.stats(), self.is_synchronous)

    def record(self) -> None:
        if self.is_synchronous:
            raise StrategyRefused(SYNCHRONOUS)
        self.client.record()

    def history(self) -> list[Event]:
        return self.client.history()

    def publish_address(self, directory: Path) -> None:
        self.launcher.announce(directory)

    def rank_state_dict(self) -> dict[str, Tensor]:
        """Return the residual of each parameter, which compression has left out so far."""
        return {
            f"{RESIDUAL_PREFIX}{name}": value for name, value in self.pusher.residuals().items()
        }

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        residuals = {
            name.removeprefix(RESIDUAL_PREFIX): value
            for name, value in private.items()
            if name.startswith(RESIDUAL_PREFIX)
        }
        self.pusher.load(residuals)
        keeps_error = self.compression is not None and self.compression.keeps_error
        return [RESIDUALS_LOST_MESSAGE] if keeps_error and not residuals else []

    def pull_state(self, optimizer: Optimizer) -> None:
        """Copy the servers' full optimizer state to this rank's optimizer. Collective."""
        states = {part.number: self.client.state(part.number) for part in self.client.parts}
        for name, parameter in self.flat.parameters.items():
            state = self.flat.gather(name, states)
            if state:
                optimizer.state[parameter] = state
        if not self.is_synchronous:
            # Else the first to continue would push while others still read the state.
            self.mesh.barrier()

    def push_state(self, optimizer: Optimizer) -> None:
        """Load the parameters and optimizer state of rank 0 to the servers. Collective."""
        self.mesh.barrier()
        self.flat.store()
        if self.mesh.rank == 0:
            state: Mapping[Any, Any] = optimizer.state
            self.client.load(
                self.flat.scatter(lambda name: state.get(self.flat.parameters[name], {}))
            )
        self.client.mark_current()
        self.mesh.barrier()
        optimizer.state.clear()

    def close(self) -> None:
        """Close connections, and stop the servers that this rank has started."""
        if self.end is not None and self.end.detach():
            self.client.close()
        self.launcher.close()

    def _require_synchronous(self, call: str) -> None:
        if not self.is_synchronous:
            raise UsageError(
                f"{call}: with staleness={self.options.staleness} each push is a step of its own: "
                "there is no gradient of all workers. Use staleness=0, or leave it out."
            )


def _members(optimizer: Optimizer) -> list[list[int]]:
    """Return the ids of the parameters of each group."""
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
