"""One worker's steps through parameter servers, and what a run asks of them beside its steps.

run       the backward pass; each part is pushed as soon as its gradients are there: `pushing.py`
          the sum of the totals is under way meanwhile, where all workers take each step together
gather    the order: what the step is to be. The servers step a part when they have everyone's push and order
forward   of the next step: before each unit, a wait for the values that it reads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shoal.comm.compression import parse
from shoal.comm.mesh import Mesh
from shoal.errors import StrategyRefused, UsageError
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.launcher.cluster_launcher import ClusterLauncher
from shoal.parameter_server.launcher.cluster_report import report
from shoal.parameter_server.launcher.server_pool import ClusterConfig
from shoal.parameter_server.node.event_log import Event
from shoal.parameter_server.optimizer_spec import OptimizerSpec, recipe_of, settings_of
from shoal.parameter_server.partitioning import ParamMeta, assign, partition, partition_bytes
from shoal.parameter_server.shard_settings import ShardSettings
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.client import WorkerClient, connect_to_servers
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.push_trace import PushTrace
from shoal.platform.tensors import MIB
from shoal.strategies import SYNCHRONOUS
from shoal.strategies.base import STOP, Forward, ForwardOutput, LocalBatch, LocalModel, StepResult
from shoal.strategies.mean_scaling import scaled_for_mean
from shoal.strategies.options import ServerOptions
from shoal.strategies.server.gradient_pusher import GradientPusher
from shoal.strategies.state import StrategyState
from shoal.strategies.wrap_units import units

RESIDUAL_PREFIX = "not_pushed."
"""How the names of what compression has left out begin. It is a share of a sum: ddp, which keeps
shares of a mean, has another name for them, for a run may go on under another strategy."""
LOST = (
    "compress: the checkpoint has nothing that this number of workers had left out of what they "
    "pushed: the memories "
    "begin at zero"
)


class WorkerEngine(StrategyState):
    """One worker's side of a run with parameter servers: it takes the steps.

    It is the part's `Remote`, which steps, and its `StrategyState`, for the servers keep the
    optimizer's state.

    Args: connect: has servers with the optimizer that a recipe says, and returns a client of them.
        The
            engine's flat memory is there by then. Collective.

    Raises: ConfigError: compress of an unknown kind.
    """

    in_gradient_units = False  # fp16 is refused for another reason: servers cannot skip a step

    def __init__(
        self, options: ServerOptions, part: LocalModel, mesh: Mesh, connect: Connect | None = None
    ) -> None:
        self.options, self.part, self.mesh = options, part, mesh
        self._connect = connect or start_servers
        self.staleness = None if options.staleness == "async" else int(options.staleness)
        self.compression = parse(options.compress)
        self.is_synchronous = self.staleness == 0
        self.totals: Tensor | None = None
        self.summed: dist.Work | None = None
        self.factor = 1.0
        self.pushed = False
        self.apart = False
        self.connected = False
        aggregates = options.aggregate and self.is_synchronous and self.compression is None
        self.staff = ClusterLauncher(mesh, aggregates, options.shared_memory)
        self.client: WorkerClient
        self.flat: FlatParams
        self.pushing: GradientPusher

    # One step

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        outcome = self.part.forward(batch)
        if batch.is_last_microbatch:
            self.totals = outcome.step_totals
            alone = self.mesh.size == 1 or not self.is_synchronous
            self.summed = None if alone else dist.all_reduce(self.totals, async_op=True)
        return outcome

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """One micro-batch; with the last one, parts are pushed as soon as their gradients are
        there.
        """
        if self.pushed:
            raise UsageError(
                "forward_backward was called twice before optimizer.step(): the first gradients "
                "are with the servers. "
                "To add up several batches use accumulate."
            )
        # Alone, a worker's push is the mean over its own share.
        num_ranks = 1 if self.is_synchronous else self.mesh.size
        self.pushing.begin(batch.is_last_microbatch)
        loss = self.part.run(forward, scaled_for_mean(batch, num_ranks))
        if not batch.is_last_microbatch:
            return loss
        self.pushing.finish()
        self.pushed, self.factor = True, 1.0
        assert self.totals is not None
        if self.summed is not None:
            self.summed.wait()
        if not self.is_synchronous:
            self._sync_stop(batch.stop_requested)
        return StepResult(self.totals, loss.is_sum_and_count)

    def gather(self) -> None:
        """Have the servers step; the values are waited for where they are used."""
        if not self.pushed:
            return
        settings = [settings_of(group) for group in self.optimizer.param_groups]
        if not self.is_synchronous:
            for group in settings:
                group["lr"] = float(group["lr"]) / self.mesh.size  # type: ignore[arg-type]
        self.optimizer.state.clear()
        self.client.request_step(StepRequest(settings, self.factor))
        self.pushed, self.apart = False, not self.is_synchronous

    def _sync_stop(self, asked: bool) -> None:
        """Workers are at different steps, and are to stop after the same one."""
        assert self.totals is not None
        self.wait()
        if asked:
            self.client.request_stop()
        self.totals[STOP] = float(0 < self.client.stop_at <= self.client.step + 1)

    # What the run asks for

    def attach(self, optimizer: Optimizer) -> None:
        """Start the servers, and give them the parameters. Collective."""
        self.optimizer = optimizer
        recipe = recipe_of(optimizer)
        groups = {
            id(p): number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        owned = dict(self.part.trainable_params)
        shapes = {name: ParamMeta(p.numel(), p.dtype, groups[id(p)]) for name, p in owned.items()}
        most_bytes, one_machine = (
            int(self.options.part_mb * MIB),
            self.mesh.place.local_world == self.mesh.place.world,
        )
        parts = partition(
            shapes,
            partition_bytes(shapes, self.options.servers, most_bytes, one_machine=one_machine),
        )
        self.flat = FlatParams(owned, parts)
        self.client = self._connect(self, recipe)
        self.connected = True
        self.pushing = GradientPusher(self.client, self.flat, self.compression)
        self.push_state(optimizer)
        self.pushing.register_hooks()
        self._wait_per_unit()

    def gradients(self) -> dict[str, Tensor | None]:
        """What the servers have summed, whole. Collective."""
        self._require_synchronous("gradients()")
        kept: dict[int, list[dict[str, Any]]] = {}
        for part in self.client.parts:
            numbers, present = self.client.gradient(part.number)
            pieces = [numbers[s.offset : s.offset + s.length] * self.factor for s in part.segments]
            kept[part.number] = [
                {"sum": g} if there else {} for g, there in zip(pieces, present, strict=True)
            ]
        return {
            name: self.flat.gather(name, kept).get("sum") for name in self.part.trainable_params
        }

    def norm(self) -> Tensor:
        """Of the gradients that the servers have summed. Collective."""
        self._require_synchronous("clip_gradients()")
        return torch.tensor(self.client.squared_norm() ** 0.5 * self.factor, dtype=torch.float64)

    def scale(self, factor: Tensor | float) -> None:
        self.factor *= float(factor)

    def wait(self) -> None:
        """All values of the last step."""
        self.client.wait(range(len(self.client.parts)))
        self.flat.copy_to_params(self.flat.parameters)

    def synchronize(self) -> bool:
        """The newest values, the same on all workers; whether they were apart. Collective."""
        self.wait()
        apart, self.apart = self.apart, False
        if apart:
            self.mesh.barrier()
            self.client.pull()
            self.wait()
            # or the first to go on would push into what others are still to pull
            self.mesh.barrier()
        return apart

    def report(self) -> list[str]:
        """What the servers have seen, for the end of a run. For one rank."""
        return report(self.client.stats(), self.is_synchronous)

    def record(self) -> None:
        if self.is_synchronous:
            raise StrategyRefused(SYNCHRONOUS)
        self.client.record()

    def history(self) -> list[Event]:
        return self.client.history()

    def publish_address(self, directory: Path) -> None:
        self.staff.announce(directory)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: `collect` gives the optimizer's state, and there is no other."""
        return {}

    def rank_state_dict(self) -> dict[str, Tensor]:
        """What compression has left out so far, of each parameter."""
        return {
            f"{RESIDUAL_PREFIX}{name}": value for name, value in self.pushing.residuals().items()
        }

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        left_out = {
            name.removeprefix(RESIDUAL_PREFIX): value
            for name, value in private.items()
            if name.startswith(RESIDUAL_PREFIX)
        }
        self.pushing.load(left_out)
        is_lost = not left_out and self.compression is not None and self.compression.keeps_error
        return [LOST] if is_lost else []

    def pull_state(self, optimizer: Optimizer) -> None:
        """The servers' state, whole, on every rank."""
        kept = {part.number: self.client.state(part.number) for part in self.client.parts}
        for name, parameter in self.flat.parameters.items():
            found = self.flat.gather(name, kept)
            if found:
                optimizer.state[parameter] = found
        if not self.is_synchronous:
            # or the first to go on would push into what others are still to collect
            self.mesh.barrier()

    def push_state(self, optimizer: Optimizer) -> None:
        """Servers go on from this rank's parameters and optimizer state. Collective."""
        self.mesh.barrier()
        self.flat.store()
        if self.mesh.rank == 0 or (self.staff.relayed and self.staff.is_starter):
            state: Mapping[Any, Any] = optimizer.state
            self.client.load(
                self.flat.scatter(lambda name: state.get(self.flat.parameters[name], {}))
            )
        self.client.mark_current()
        self.mesh.barrier()
        optimizer.state.clear()

    def close(self) -> None:
        """Hang up, and end the servers that this rank has started."""
        if self.connected:
            self.client.close()
        self.staff.close()

    def _wait_per_unit(self) -> None:
        """Have each unit's forward pass wait for the values that it reads, and for no others."""
        names = {id(parameter): name for name, parameter in self.flat.parameters.items()}
        root, left = self.part.module, set(self.flat.parameters)
        for unit in [*reversed(units(root).values()), root]:
            inside = [
                names[id(p)] for p in unit.parameters() if id(p) in names and names[id(p)] in left
            ]
            left -= set(inside)
            numbers = sorted({number for name in inside for number in self.pushing.parts_of[name]})
            unit.register_forward_pre_hook(self._pull_before(inside, numbers))

    def _pull_before(self, names: list[str], numbers: list[int]) -> Any:
        def wait(*_: Any) -> None:
            self.client.wait(numbers)
            self.flat.copy_to_params(names)

        return torch.compiler.disable(wait)

    def _require_synchronous(self, call: str) -> None:
        if not self.is_synchronous:
            raise UsageError(
                f"{call}: with staleness={self.options.staleness} no step is shared by all workers."
            )


Connect = Callable[[WorkerEngine, OptimizerSpec], WorkerClient]


def start_servers(engine: WorkerEngine, recipe: OptimizerSpec) -> WorkerClient:
    """Start the servers of an engine's parts, and connect to them. Collective."""
    options, flat, staleness = engine.options, engine.flat, engine.staleness
    owners = tuple(assign(flat.parts, options.servers))

    def make(transport: Transport, folder: Path, workers: int) -> ClusterConfig:
        settings = ShardSettings(
            tuple(flat.parts), recipe, workers, staleness, options.lease_s, engine.compression
        )
        return ClusterConfig(transport, folder, settings, owners, options.servers, options.replicas)

    job, arbiter = engine.staff.start(make)
    ranks = range(engine.mesh.size) if engine.is_synchronous else ()
    others = tuple(rank for rank in ranks if rank != engine.mesh.rank)
    return connect_to_servers(
        engine.staff.worker,
        flat,
        arbiter,
        job.transport,
        staleness=staleness,
        shares=options.shared_memory and engine.compression is None,
        trace=PushTrace(engine.mesh.recorder, others),
    )
