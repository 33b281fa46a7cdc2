"""Notes about the first step: what makes it differ from that of one device.

collectives      What torch.distributed sends passes no gradient to the other ranks.
hooks            A module's backward hook may bound gradients of some rows of the batch.
buffers          Codebooks, queues and moving averages are computed from a batch. Where each rank,
                 or each micro-batch, has another part of it, their values are not those of one
                 device. BatchNorm has a note of its own.
random numbers   A layer may draw in its `forward` (stochastic depth, noise, `F.dropout`), and so
                 may the loss. Every random operator of the first step is seen, and where it was
                 called, beyond the layers that the startup summary names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.data.draws import draws_numbers
from shoal.data.seeds import HostGenerators
from shoal.data.tree_map import tensors_in
from shoal.platform.script_line import caller, calling_line, is_called_from, script_line
from shoal.platform.torch_private.module_state import BatchNormBase, hooks_of, is_compiled
from shoal.platform.torch_private.subclasses import DispatchMode
from shoal.platform.torch_private.tensor_state import schema_of
from shoal.run.prepared import Prepared
from shoal.shm_backend.torch_calls import watchers
from shoal.strategies.grad_checks import is_of_script
from shoal.strategies.module_snapshot import changed_since, mutable_buffers, snapshot
from shoal.strategies.wrap_units import has_dropout


@contextmanager
def noting_first_step(prepared: Prepared, is_computed: bool) -> Iterator[None]:
    """Announce what makes the passes of this context differ from one device's. Collective.

    With one pass through each batch there is nothing to tell.

    Args: is_computed: the loop has made the forward pass before.
    """
    mesh, settings = prepared.mesh, prepared.settings
    in_micro_batches = settings.accumulate > 1 or mesh.pipeline.size > 1
    with ExitStack() as notes:
        collectives = ScriptCollectives(prepared)
        notes.callback(collectives.watch, False)
        collectives.watch(mesh.size > 1)
        if mesh.data.size == 1 and not in_micro_batches:
            yield
            return
        _note_backward_hooks(prepared)
        notes.enter_context(_noting_buffers(prepared, in_micro_batches, is_computed))
        if settings.draws != "global":
            notes.enter_context(_noting_draws(prepared))
        yield


def _note_backward_hooks(prepared: Prepared) -> None:
    """Announce modules whose hooks may change gradients of some rows of a batch."""
    names = [
        name or type(module).__name__
        for name, module in prepared.root.named_modules()
        if any(map(is_of_script, hooks_of(module, "backward", "backward_pre")))
    ]
    if names:
        prepared.announce(
            f"note: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: a backward "
            "hook sees gradients of some rows of the batch. What it puts in their place must be "
            "linear in them: a bound, a norm or a sign is not that of one device. "
            "run.clip_gradients is of all ranks."
        )


WRITES = "pass writes these buffers from the samples of one rank"
"""Words of the note by which it is known."""


@contextmanager
def _noting_buffers(prepared: Prepared, divided: bool, is_computed: bool) -> Iterator[None]:
    """Announce buffers that the block writes and that differ between ranks. Collective.

    Args:
        divided: a batch is divided into micro-batches, so buffers that are equal on all ranks may
            differ from one device's too.
        is_computed: what was written before the block counts, if ranks differ in it.
    """
    module, mesh = prepared.local_model().module, prepared.mesh
    before = {} if is_computed else snapshot(module, BatchNormBase)
    yield
    changes = changed_since(module, before, BatchNormBase)
    apart = _buffers_apart(module, changes, mesh, divided and not is_computed)
    stages = mesh.pipeline.all_gather_json(apart)  # each rank knows its own buffers
    names = [*dict.fromkeys(name for stage in stages for name in stage)]
    if names:
        prepared.announce(
            f"note: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: a forward "
            f"{WRITES} or micro-batch, so they are not those of one device. Compute them from "
            "run.gather(...), if they must be."
        )


def _buffers_apart(
    module: nn.Module, changes: Mapping[str, bool], mesh: Mesh, divided: bool
) -> list[str]:
    """Return the buffers here that were written and are not those of one device. Collective over
    the data axis.
    """
    buffers = mutable_buffers(module, BatchNormBase)
    names = [name for name in buffers if changes[name] and buffers[name].is_floating_point()]
    flags = torch.tensor([name in names for name in buffers], dtype=torch.float64)
    if not len(buffers) or not bool(mesh.data.all_reduce(flags.to(mesh.device)).sum()):
        return []
    sums = torch.stack([_checksum(buffer) for buffer in buffers.values()]).to(mesh.device)
    largest, negated_smallest = mesh.data.all_reduce_max(torch.stack((sums, -sums)))
    differs = (largest + negated_smallest > 0).tolist()
    return [
        name.removeprefix(".")
        for name, differ in zip(buffers, differs, strict=True)
        if differ or (divided and name in names)
    ]


def _checksum(buffer: Tensor) -> Tensor:
    """Return a number that differs where values differ, nearly always; 0 for other dtypes."""
    if not buffer.is_floating_point() or not buffer.numel() or buffer.is_meta:
        return torch.zeros((), dtype=torch.float64)
    return torch.nan_to_num(buffer.detach().double()).sum().cpu()


_COMM = f"{Path(__file__).parents[1] / 'comm'}/"
"""Folder whose draws are no part of a pass, as the first guess of PowerSGD is."""
HOST_DRAWS = (
    "numbers from Python's or NumPy's generator count for the whole batch, as on one device: every "
    "rank and every micro-batch draws the same ones. Draw numbers for each sample with torch."
)


class RandomOperators(DispatchMode):
    """Notes which random operators run inside, and in which module or line.

    Args: module: the prepared model, or the group of them.

    Attributes: places: descriptions of the places that draw, each once, in order.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, None] = {}
        self._names = {id(inner): name for name, inner in module.named_modules() if name}
        self._known = {id(inner) for inner in module.modules() if has_dropout(inner)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_numbers(func, args, kwargs or {}) and not is_called_from(_COMM, caller()):
            self._note(schema_of(func).name.partition("::")[2].removesuffix("_"), caller())
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, frame: FrameType | None) -> None:
        """Remember the innermost module and the innermost line of the user's own."""
        name, line = "", script_line(frame)
        while frame is not None and not name:
            holder = id(frame.f_locals.get("self"))
            if holder in self._known:
                return  # the startup summary has named it
            name = self._names.get(holder, "")
            frame = frame.f_back
        place = " at ".join(part for part in (name, line) if part)
        self.places[f"{operator} in {place}" if place else operator] = None


@contextmanager
def _noting_draws(prepared: Prepared) -> Iterator[None]:
    """Announce what draws random numbers inside, with one note; nothing for a compiled model."""
    module = prepared.local_model().module
    if any(map(is_compiled, module.modules())):
        yield
        return
    before = HostGenerators.now()
    with RandomOperators(module) as operators:
        yield
    sentences = []
    if operators.places:
        first, *others = operators.places
        more = f" and {len(others)} more" if others else ""
        sentences.append(
            f"the first step draws random numbers ({first}{more}): a stream of its own on every "
            "rank, so same distribution, other numbers."
        )
        if not prepared.local_model().is_partial:  # stages draw at the same time
            sentences.append('draws="global" draws those of one device.')
    if HostGenerators.now() != before:
        sentences.append(HOST_DRAWS)
    if sentences:
        prepared.announce(f"note: {' '.join(sentences)}")


SENT = (
    "note: the loss computes with what torch.distributed has sent ({place}), which passes no "
    "gradient to the other ranks: the mean over ranks is a part of one device's. "
    "run.gather(tensor) gives the rows of all ranks, and passes each its gradient."
)
COUNTED_TWICE = (
    "note: torch.distributed is called ({place}) over all {ranks} ranks, of which {times} each "
    "have the same samples: a sum over ranks counts a sample {times} times. run.gather(tensor) "
    "has its rows once."
)


class ScriptCollectives:
    """Announces, once, collectives of the script that do not come to what one device computes:
    those through which a gradient would have to go, and those over ranks with the same samples.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def watch(self, begins: bool) -> None:
        """Look at the collectives that the script makes from now on, or no longer."""
        if begins and self._look_at not in watchers:
            watchers.append(self._look_at)
        elif not begins and self._look_at in watchers:
            watchers.remove(self._look_at)

    def _look_at(self, arguments: Any) -> None:
        mesh = self._prepared.mesh
        times = mesh.size // mesh.data.size
        if times > 1 and (place := calling_line(caller(2), by_distributed=True)):
            self._prepared.note_once(COUNTED_TWICE, place=place, ranks=mesh.size, times=times)
        if torch.is_grad_enabled():
            for tensor in tensors_in(arguments):
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._tell, script_line(caller())))

    def _tell(self, place: str, _: Tensor) -> None:
        """Announce it in the backward pass: what is sent may go into a buffer alone."""
        self._prepared.note_once(SENT, place=place)
