"""The record of one run of a script, in files that nothing but JSON and safetensors reads.

    folder/
      rank-0/
        start.safetensors      weights and buffers from before the first step
        index.json             what the rank is, and for each step its calls, losses and names
        step-1.safetensors     forward/0 ... backward/0 ... gradient/NAME weight/NAME buffer/NAME
        batches/0-0-0.safetensors   what the first loop took from the first loader
      rank-1/ ...

A step ends with `optimizer.step()` of any optimizer, so a loop over two optimizers has two steps
for each batch. All ranks write; full gradients and weights only rank 0 writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import RecordError


@dataclass
class CallRecord:
    """One call of a module in a step.

    Attributes:
        module: its name in the model; "" for the model itself.
        kind: the name of its class.
        line: the user's line that led to the call, "train.py:31"; "" where there is none.
        outputs: the number of floating tensors that it returned, `forward/<index>/<output>`.
        draws: random numbers were drawn in the call, or since the call before it.
    """

    module: str
    kind: str
    line: str = ""
    outputs: int = 0
    draws: bool = False


@dataclass
class StepRecord:
    """One step: all that happened up to an `optimizer.step()`.

    Attributes:
        number: from 1.
        calls: of modules, in the order in which they ended.
        losses: the values that the backward passes began with; under Shoal the global mean.
        settings: of its parameter groups, numbers only.
        gradients: name of each trainable parameter -> True if it had a gradient.
        collectives: messages of this rank while modules computed outputs; -1 where a backend does
            not count them.
        draws_in_loss: random numbers were drawn between the last call and the backward pass.
        digests: name of a gradient or weight -> two numbers that differ where its values do.
        lines: "backward" and "step" -> the user's lines.
    """

    number: int
    calls: list[CallRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    gradients: dict[str, bool] = field(default_factory=dict)
    collectives: int = 0
    draws_in_loss: bool = False
    digests: dict[str, list[float]] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)


@dataclass
class RankRecord:
    """The index of one rank's record.

    Attributes:
        rank, world: the number of this process, and of all.
        axes: name of a mesh axis -> (this rank's number on it, its length).
        by_shoal: the script prepares its model by Shoal.
        has_group: torch.distributed was initialized when a model was called first.
        steps: the recorded steps.
        refusal: the message with which Shoal refused the script; None if it did not.
        is_synchronous: all ranks take each step together.
        notes: lines for the user.
        loaders: "<number of the loader>-<number of the loop over it>" of each loop over a loader.
        draws: tells apart the states of the random numbers at the first dropout that is off.
        draws_of_loop: what the loop draws random numbers by for its samples, "NumPy"; "": nothing.
    """

    rank: int
    world: int
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    by_shoal: bool = False
    has_group: bool = True
    steps: list[StepRecord] = field(default_factory=list)
    refusal: str | None = None
    is_synchronous: bool = True
    notes: list[str] = field(default_factory=list)
    loaders: list[str] = field(default_factory=list)
    draws: str = ""
    draws_of_loop: str = ""

    def axis(self, name: str) -> tuple[int, int]:
        """Return (this rank's number, length) of an axis; without a mesh all ranks are "data"."""
        alone = (self.rank, self.world) if name == "data" and not self.axes else (0, 1)
        return self.axes.get(name, alone)

    def note(self, text: str) -> None:
        """Add a line for the user, once."""
        if text not in self.notes:
            self.notes.append(text)


class RecordWriter:
    """Writes one rank's record.

    Args: folder: of the whole run; the rank's own folder is made in it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = Path(folder, f"rank-{rank}")
        (self.folder / "batches").mkdir(parents=True, exist_ok=True)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors: of "start", "step-1", or the batch "batches/0-0-0"."""
        # Tensors that share memory would be refused.
        own = {key: t.detach().cpu().clone().contiguous() for key, t in tensors.items()}
        save_file(own, self.folder / f"{name}.safetensors")

    def index(self, record: RankRecord) -> None:
        """Write the index; the last file of a record."""
        (self.folder / "index.json").write_text(json.dumps(asdict(record)))


def read_run(folder: Path) -> list[RankRecord]:
    """Return the indices of all ranks of a run, by rank.

    Raises: RecordError: the folder holds no complete record.
    """
    ranks = [_read_rank(file) for file in Path(folder).glob("rank-*/index.json")]
    ranks.sort(key=lambda record: record.rank)
    if not ranks or [record.rank for record in ranks] != list(range(ranks[0].world)):
        found = ", ".join(str(record.rank) for record in ranks) or "none"
        raise RecordError(
            f"{folder} holds no complete record of a run: of its ranks there are {found}. Record "
            "the run again."
        )
    return ranks


def _read_rank(file: Path) -> RankRecord:
    values: dict[str, Any] = json.loads(file.read_text())
    values["axes"] = {name: (place, size) for name, (place, size) in values["axes"].items()}
    values["steps"] = [
        StepRecord(**{**step, "calls": [CallRecord(**call) for call in step["calls"]]})
        for step in values["steps"]
    ]
    return RankRecord(**values)


class RecordedTensors:
    """The tensors of one file of a record, read when they are asked for."""

    def __init__(self, file: Path) -> None:
        self._file = safe_open(file, framework="pt") if file.exists() else None
        self.names = frozenset(self._file.keys()) if self._file is not None else frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        assert self._file is not None
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def get(self, name: str) -> Tensor | None:
        """Return the tensor of a name; None without one."""
        return self[name] if name in self.names else None

    def below(self, kind: str) -> dict[str, Tensor]:
        """Return all tensors whose names begin with `kind/`, by the rest of their names."""
        prefix = f"{kind}/"
        return {
            name.removeprefix(prefix): self[name]
            for name in sorted(self.names)
            if name.startswith(prefix)
        }


def recorded(folder: Path, rank: int, name: str) -> RecordedTensors:
    """Return what a rank has written under a name; empty if it has written nothing."""
    return RecordedTensors(Path(folder, f"rank-{rank}", f"{name}.safetensors"))
