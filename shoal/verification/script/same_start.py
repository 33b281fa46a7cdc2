"""Settings by which one process begins and goes on as the ranks do: weights, learning rates."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import Optimizer

from shoal.comm.norm import to_local
from shoal.verification.script.model_names import ModelNames
from shoal.verification.script.run_record import RankRecord, starting_weights


class SameStart:
    """Gives the models of one process the weights, and its optimizers the rates, of many ranks.

    Args:
        folder: of the record of the ranks.
        ranks: its indices.
        record: the index of this process, for notes.
    """

    def __init__(self, folder: Path, ranks: list[RankRecord], record: RankRecord) -> None:
        self._weights = starting_weights(folder)
        self._steps = {step.number: step for step in ranks[0].steps}
        self._record = record

    def load(self, names: ModelNames) -> None:
        """Copy the weights that rank 0 began with into the models."""
        differ = []
        with torch.no_grad():
            for name, parameter in names.parameters():
                if name in self._weights:
                    value = self._weights[name].to(parameter.dtype)
                    own = to_local(parameter)
                    if own.shape == value.shape and not torch.equal(own, value):
                        differ.append(name)
                        own.copy_(value)
        if differ:
            self._note(
                f"one process began with other weights than the ranks ({differ[0]} and "
                f"{len(differ) - 1} more), and was given theirs: the script's seed depends on "
                "the number of processes."
            )

    def set_rates(self, number: int, optimizer: Optimizer) -> None:
        """Give the groups of an optimizer the learning rates of the same step of the ranks."""
        step = self._steps.get(number)
        if step is None:
            return
        for group, settings in zip(optimizer.param_groups, step.settings, strict=False):
            rate = settings.get("lr")
            if rate is not None and float(group["lr"]) != rate:
                self._note(
                    f"the learning rate depends on the number of processes: {rate:g} on many, "
                    f"{float(group['lr']):g} on one, which was given that of many."
                )
                group["lr"] = rate

    def _note(self, text: str) -> None:
        if text not in self._record.notes:
            self._record.notes.append(text)
