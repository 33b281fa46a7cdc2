"""Parameter servers: processes that own the parameters. Workers push gradients, servers step, workers pull values.

      worker 0   forward ── backward ── order ─ ─ ─ forward of the next step waits, layer by layer
                        push ↘  ↘  ↘      │      ↗  ↗  ↗ pull
      server a             sum ── sum ──  step ──
      server b             sum ──── sum ─ step ──
                        push ↗  ↗  ↗      │      ↘  ↘  ↘ pull
      worker 1   forward ── backward ── order ─ ─ ─ forward ...

Sources: Li et al., OSDI 2014 (the architecture); Ho et al., NIPS 2013 (bounded staleness); Jiang et al., OSDI 2020
(push in the order of the backward pass, pull in that of the forward pass).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.compress import Compression, parse
from shoal.comm.mesh import Mesh, close_before_leaving
from shoal.errors import StrategyRefused, UsageError
from shoal.server.client import Client
from shoal.server.flat import Flat
from shoal.server.fleet import Job
from shoal.server.history import Event
from shoal.server.key import read_key
from shoal.server.layout import MIB, Shape, cut, place
from shoal.server.layout import Part as Layout
from shoal.server.recipe import Recipe, recipe_of, settings_of
from shoal.server.said import Order
from shoal.server.staff import Staff
from shoal.server.tls import refuse_bad
from shoal.strategies import SYNCHRONOUS
from shoal.strategies.base import STOP, Batch, Forward, Loss, Outcome, Part
from shoal.strategies.complex_numbers import refuse_complex
from shoal.strategies.options import ServerOptions
from shoal.strategies.units import units
from shoal.strategies.whole_gradients import in_two_pieces

PARTS_A_SERVER, SMALL_PART_BYTES = 4, 64 * 1024


class Server(ServerOptions):
    """Sharded parameter servers beside the workers, started and ended with them."""

    helpers: ClassVar[bool] = True

    def cut(self, part: Part, mesh: Mesh) -> Part:
        """Replaces forward, run, gather and remote. Collective.

        Raises:
            StrategyRefused: the model has no trainable parameter; a mesh with other axes than data; compress of complex
                numbers; complex128.
            ConfigError: no such certificate.
        """
        if not part.owned:
            raise StrategyRefused("strategy server steps parameters on servers; the model has no trainable parameter.")
        if mesh.data.size < mesh.size:
            raise StrategyRefused(
                "strategy server owns whole parameters; beside tensor and pipeline no rank has them. Use ddp or zero1."
            )
        if self.compress != "none":
            refuse_complex(part.owned, self.compress)
        double = [name for name, parameter in part.owned.items() if parameter.dtype == torch.complex128]
        if double:
            raise StrategyRefused(
                f"strategy server sends complex numbers as complex64, and {', '.join(double)} is complex128. Use "
                "complex64, or ddp."
            )
        mesh.broadcast(part.module)
        engine = self.engine(part, mesh)
        close_before_leaving(engine)
        return replace(part, forward=engine.forward, run=engine.run, gather=engine.gather, remote=engine)

    def engine(self, part: Part, mesh: Mesh) -> Engine:
        """What takes this rank's steps. Raises ConfigError."""
        staleness = None if self.staleness == "async" else int(self.staleness)
        return Engine(self, staleness, parse(self.compress), part, mesh)

    @property
    def certificate(self) -> Path | None:
        """What connections are encrypted with. Raises ConfigError."""
        if self.tls == "none":
            return None
        refuse_bad(Path(self.tls))
        return Path(self.tls).resolve()

    @property
    def notes(self) -> list[str]:
        """Why the numbers are not those of one device, where they are not."""
        notes = []
        if self.staleness != "0":
            behind = "any number of" if self.staleness == "async" else f"up to {self.staleness}"
            notes.append(f"staleness={self.staleness}: gradients are of weights that lack {behind} of others' steps.")
        if self.compress != "none":
            notes.append(f"compress={self.compress}: gradients arrive rounded, or late.")
        return notes


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


class Engine:
    """One worker's steps through the servers."""

    def __init__(
        self, options: Server, staleness: int | None, compression: Compression | None, part: Part, mesh: Mesh
    ) -> None:
        self.options, self.staleness, self.part, self.mesh = options, staleness, part, mesh
        self.compression = compression
        self.together = staleness == 0
        self.totals: Tensor | None = None
        self.summed: dist.Work | None = None
        self.factor = 1.0
        self.pushing = False
        self.pushed = False
        self.apart = False
        aggregates = options.aggregate and self.together and compression is None
        self.staff = Staff(mesh, aggregates, options.shared_memory, options.certificate)
        self.messages: dict[int, Tensor] = {}
        self.left_out: dict[int, Tensor] = {}
        self.client: Client
        self.flat: Flat

    # One step

    def forward(self, batch: Batch) -> Outcome:
        outcome = self.part.forward(batch)
        if batch.last:
            self.totals = outcome.totals
            alone = self.mesh.size == 1 or not self.together
            self.summed = None if alone else dist.all_reduce(self.totals, async_op=True)
        return outcome

    def run(self, forward: Forward, batch: Batch) -> Loss:
        """One micro-batch; with the last one, parts are pushed as soon as their gradients are there."""
        if self.pushed:
            raise UsageError(
                "forward_backward was called twice before optimizer.step(): the first gradients are with the servers. "
                "To add up several batches use accumulate."
            )
        # Alone, a worker's push is the mean over its own share.
        scale = 1.0 if self.together else float(self.mesh.size)
        self.pushing = batch.last
        self.missing = [len(names) for names in self.names]
        loss = self.part.run(forward, batch._replace(scale=batch.scale * scale))
        self.pushing = False
        if not batch.last:
            return loss
        for number, missing in enumerate(self.missing):
            if missing:
                self._push(number)
        self.pushed, self.factor = True, 1.0
        assert self.totals is not None
        if self.summed is not None:
            self.summed.wait()
        if not self.together:
            self._agree_to_stop(batch.stop)
        return Loss(self.totals, loss.weighed)

    def gather(self) -> None:
        """Have the servers step; the values are waited for where they are used."""
        if not self.pushed:
            return
        settings = [settings_of(group) for group in self.optimizer.param_groups]
        if not self.together:
            for group in settings:
                group["lr"] = float(group["lr"]) / self.mesh.size  # type: ignore[arg-type]
        self.optimizer.state.clear()
        self.client.order(Order(settings, self.factor))
        self.pushed, self.apart = False, not self.together

    def _agree_to_stop(self, asked: bool) -> None:
        """Workers are at different steps, and are to stop after the same one."""
        assert self.totals is not None
        self.wait()
        if asked:
            self.client.ask_to_stop()
        self.totals[STOP] = float(0 < self.client.stop_at <= self.client.step + 1)

    def _has_gradient(self, name: str) -> None:
        if not self.pushing:
            return
        for number in self.parts_of[name]:
            self.missing[number] -= 1
            if self.missing[number] < 0:
                raise in_two_pieces(name)
            if self.missing[number] == 0:
                self._push(number)

    def _push(self, number: int) -> None:
        """Send a part, with what gradients it has; a parameter's are dropped with its last part."""
        segments = self.client.parts[number].segments
        gradients = [self.flat.parameters[segment.name].grad for segment in segments]
        present = bytes(gradient is not None for gradient in gradients)
        sparse = self.compression is None and any(g is not None and g.is_sparse for g in gradients)
        whole = gradients[0] if len(segments) == 1 and self.compression is None else None
        message = None if whole is None else self.flat.run_of(segments[0], whole)
        if message is None:
            self._lay(number)
            message = self._message(number)
        self.missing[number] = 0
        self.client.push(number, message, present, sparse)
        for segment in segments:
            parameter = self.flat.parameters[segment.name]
            if segment.start + segment.length == parameter.numel():
                parameter.grad = None

    def _lay(self, number: int) -> None:
        """Lay a part's gradients end to end; a parameter's are laid with its first part."""
        for segment in self.client.parts[number].segments:
            gradient, window = self.flat.parameters[segment.name].grad, self.flat.gradient_windows[segment.name]
            if segment.start == 0:
                window.zero_() if gradient is None else window.copy_(_dense(gradient))

    def _message(self, number: int) -> Tensor:
        """What goes over the wire for a part's gradient, as it is laid."""
        gradient = self.flat.gradients[number]
        if self.compression is None:
            return gradient
        if number not in self.messages:
            size_bytes = self.compression.size_bytes(gradient.numel(), gradient.dtype)
            self.messages[number] = torch.empty(size_bytes, dtype=torch.uint8)
            if self.compression.keeps_error and number not in self.left_out:
                self.left_out[number] = torch.zeros_like(gradient)
        self.compression.encode(gradient, self.left_out.get(number), self.messages[number])
        return self.messages[number]

    # What the run asks for

    def take(self, optimizer: Optimizer) -> None:
        """Start the servers, and give them the parameters. Collective."""
        self.optimizer = optimizer
        recipe = recipe_of(optimizer)
        groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        owned = dict(self.part.owned)
        shapes = {name: Shape(p.numel(), p.dtype, groups[id(p)]) for name, p in owned.items()}
        parts = cut(shapes, self._part_bytes(shapes))
        self.flat = Flat(owned, parts)
        self.names = [[segment.name for segment in part.segments] for part in parts]
        self.parts_of: dict[str, list[int]] = {name: [] for name in owned}
        for part in parts:
            for segment in part.segments:
                self.parts_of[segment.name].append(part.number)
        self.client = self.connect(parts, recipe)
        self.spread(optimizer)
        self._hook(owned)

    def connect(self, parts: list[Layout], recipe: Recipe) -> Client:
        """Start the servers of a model that is cut so, and talk to them. Collective."""
        options, owners = self.options, tuple(place(parts, self.options.servers))

        def make(name: str, key_file: Path, workers: int) -> Job:
            return Job(
                name,
                key_file,
                tuple(parts),
                owners,
                options.servers,
                recipe,
                options.replicas,
                workers,
                self.staleness,
                options.lease_s,
                self.compression,
                connections=options.connections,
            )

        job, arbiter = self.staff.start(make)
        return Client(
            self.staff.worker,
            parts,
            arbiter,
            self.flat,
            key=read_key(job.key_file),
            job=job.name,
            staleness=self.staleness,
            shares=self.options.shared_memory and self.compression is None,
            recorder=self.mesh.recorder,
            awaited=tuple(r for r in range(self.mesh.size) if self.together and r != self.mesh.rank),
            connections=job.connections,
        )

    def _part_bytes(self, shapes: Mapping[str, Shape]) -> int:
        """Small models are cut into smaller parts, so that every server has some."""
        whole = sum(shape.length * shape.dtype.itemsize for shape in shapes.values())
        even = max(SMALL_PART_BYTES, whole // (PARTS_A_SERVER * self.options.servers))
        return min(even, int(self.options.part_mb * MIB))

    def gradients(self) -> dict[str, Tensor | None]:
        """What the servers have summed, whole. Collective."""
        self._refuse_stale("gradients()")
        kept: dict[int, list[dict[str, Any]]] = {}
        for part in self.client.parts:
            numbers, present = self.client.gradient(part.number)
            pieces = [numbers[s.offset : s.offset + s.length] * self.factor for s in part.segments]
            kept[part.number] = [{"sum": g} if there else {} for g, there in zip(pieces, present, strict=True)]
        return {name: self.flat.gather(name, kept).get("sum") for name in self.part.owned}

    def norm(self) -> Tensor:
        """Of the gradients that the servers have summed. Collective."""
        self._refuse_stale("clip_gradients()")
        return torch.tensor(self.client.squared_norm() ** 0.5 * self.factor, dtype=torch.float64)

    def scale(self, factor: Tensor | float) -> None:
        self.factor *= float(factor)

    def wait(self) -> None:
        """All values of the last step."""
        self.client.wait(range(len(self.client.parts)))
        self.flat.fetch(self.flat.parameters)

    def agree(self) -> bool:
        """The newest values, the same on all workers; whether they were apart. Collective."""
        self.wait()
        apart, self.apart = self.apart, False
        if apart:
            self.mesh.barrier()
            self.client.pull()
            self.wait()
            self.mesh.barrier()  # or the first to go on would push into what others are still to pull
        return apart

    def report(self) -> list[str]:
        """What the servers have seen, for the end of a run. For one rank."""
        figures = [behind for figure in self.client.figures() for behind in figure.get("behind", [figure])]
        received, sent = (sum(figure[key] for figure in figures) / MIB for key in ("received_bytes", "sent_bytes"))
        lines = [f"servers: {len(figures)} shards received {received:,.1f} MiB and sent {sent:,.1f} MiB"]
        refused = sum(figure["refused"] for figure in figures)
        if refused:
            lines.append(f"servers refused {refused} connections or messages: their warnings say why")
        seen: Counter[int] = Counter()
        for figure in figures:
            seen.update({int(gap): count for gap, count in figure["staleness"].items()})
        if not self.together:
            shares = (f"{gap}: {100 * seen[gap] / seen.total():.1f} %" for gap in sorted(seen))
            lines.append(f"steps that a worker was ahead of the slowest when it read: {', '.join(shares)}")
        return lines

    def record(self) -> None:
        if self.together:
            raise StrategyRefused(SYNCHRONOUS)
        self.client.record()

    def history(self) -> list[Event]:
        return self.client.history()

    def announce(self, directory: Path) -> None:
        self.staff.announce(directory)

    def private(self) -> dict[str, Tensor]:
        """What compression has left out so far, of each part."""
        return {f"left_out.{number}": value for number, value in self.left_out.items()}

    def load_private(self, found: Mapping[str, Tensor]) -> None:
        self.left_out = {
            int(name.removeprefix("left_out.")): value.clone()
            for name, value in found.items()
            if name.startswith("left_out.")
        }

    def collect(self, optimizer: Optimizer) -> None:
        """The servers' state, whole, on every rank."""
        kept = {part.number: self.client.state(part.number) for part in self.client.parts}
        for name, parameter in self.flat.parameters.items():
            found = self.flat.gather(name, kept)
            if found:
                optimizer.state[parameter] = found
        if not self.together:
            self.mesh.barrier()  # or the first to go on would push into what others are still to collect

    def spread(self, optimizer: Optimizer) -> None:
        """Servers go on from this rank's parameters and optimizer state. Collective."""
        self.mesh.barrier()
        self.flat.store()
        if self.mesh.rank == 0 or (self.staff.relayed and self.staff.starts):
            state: Mapping[Any, Any] = optimizer.state
            self.client.load(self.flat.scatter(lambda name: state.get(self.flat.parameters[name], {})))
        self.client.begin()
        self.mesh.barrier()
        optimizer.state.clear()

    def close(self) -> None:
        """Hang up, and end the servers that this rank has started."""
        if hasattr(self, "client"):
            self.client.close()
        self.staff.close()

    def _hook(self, owned: Mapping[str, nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in owned.items()}
        for parameter in owned.values():
            parameter.register_post_accumulate_grad_hook(lambda p: self._has_gradient(names[id(p)]))
        root, left = self.part.module, set(owned)
        for unit in [*reversed(units(root).values()), root]:
            inside = [names[id(p)] for p in unit.parameters() if id(p) in names and names[id(p)] in left]
            left -= set(inside)
            numbers = sorted({number for name in inside for number in self.parts_of[name]})
            unit.register_forward_pre_hook(self._waits_for(inside, numbers))

    def _waits_for(self, names: list[str], numbers: list[int]) -> Any:
        def wait(*_: Any) -> None:
            self.client.wait(numbers)
            self.flat.fetch(names)

        return torch.compiler.disable(wait)

    def _refuse_stale(self, call: str) -> None:
        if not self.together:
            raise UsageError(f"{call}: with staleness={self.options.staleness} no step is shared by all workers.")
