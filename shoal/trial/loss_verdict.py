"""The result of a trial of `compute_loss`, and the sentences that tell it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal.strategies.module_snapshot import is_trial_running


class LossKind(Enum):
    """The way in which the loss of a batch follows from those of its parts."""

    MEAN = "mean"
    """The mean over samples, weighted by their numbers."""
    COUNTED = "counted"
    """Sums and counts add up, as do means beside them."""
    SUM = "sum"
    """The losses of parts add up, without a count."""
    COUPLED = "coupled"
    """Neither: samples of a batch influence one another."""
    FAILS_ON_PARTS = "fails on parts"
    """It raises an error on fewer samples."""
    NEEDS_TWO_ROWS = "needs two rows"
    """A mean wherever each part has at least two samples."""
    NOT_JUDGED = "not judged"
    """Randomness or rounding hides the answer, or it cannot be tried without side effects."""


OBJECTIONS = frozenset({LossKind.SUM, LossKind.COUPLED, LossKind.FAILS_ON_PARTS})
"""Kinds of which several ranks would compute other gradients than one."""

CURES = (
    "Where it divides by what it counts in the batch (targets that are not ignored, weights of "
    "classes), return shoal.counted(sum, count); of a mean that a model returns, mean * count and "
    "count. Where it compares or mixes samples, compute it from the samples of all ranks with "
    "run.gather(tensor). Or, to train each rank's own loss and take the mean over ranks, say so: "
    'run.forward_backward(..., reduction="ranks").'
)


class CannotTry(Exception):
    """Raised where a trial cannot be made; the text completes `it meets ...`.

    Without a text the user has decided against it, and nothing is to be said.
    """

    @property
    def reason(self) -> str:
        """The reason as a sentence without a full stop; empty if nothing is to be said."""
        return f"it meets {self}" if str(self) else ""


@dataclass(frozen=True)
class LossVerdict:
    """The result of one trial.

    Attributes:
        difference: of the gradients (or losses) of the parts from those of the whole, relative; of
            a loss that fails on some parts, those of the others.
        sizes: samples of the parts that differ most, and of the whole; empty if none were compared.
        reason: why it was not tried or cannot be judged, or the error on fewer samples.
        misplaced: a draw that `draws="global"` would misunderstand, with the cure; empty if none.
        memory: difference of the gradients of all samples after one half of them from those after
            the other half, where the function keeps something of the samples; else 0.
        own_numbers: names of numbers of the script that differ on ranks and that the loss reads.
    """

    kind: LossKind
    difference: float = 0.0
    sizes: tuple[int, ...] = ()
    reason: str = ""
    misplaced: str = ""
    memory: float = 0.0
    own_numbers: tuple[str, ...] = ()

    @property
    def objects(self) -> bool:
        """True if several ranks would compute other gradients than one."""
        return self.kind in OBJECTIONS or bool(self.misplaced)

    @property
    def ends_a_run(self) -> bool:
        """True for an objection that later steps raise; a failure on parts is left alone there."""
        return self.objects and self.kind is not LossKind.FAILS_ON_PARTS

    @property
    def is_worth_a_note(self) -> bool:
        """False for a good loss, and where there was nothing to try."""
        if self.kind is LossKind.NOT_JUDGED:
            return bool(self.reason)
        is_good = self.kind in (LossKind.MEAN, LossKind.COUNTED)
        return not is_good or self.computes_with_own_values

    @property
    def computes_with_own_values(self) -> bool:
        """True if the loss reads what this rank has of its own samples."""
        return bool(self.memory or self.own_numbers)

    def text(self) -> str:
        """Return what was seen as sentences, with the cures if there is an objection."""
        if self.kind in OBJECTIONS:
            return f"{self._objection()} {CURES}"
        if self.misplaced:
            return self.misplaced
        if self.kind is LossKind.NEEDS_TWO_ROWS:
            return (
                "compute_loss needs at least 2 samples on each rank: on 1 sample "
                f"{self.reason}. Choose a batch size of at least twice the number of ranks, with "
                "drop_last=True if the last batch of an epoch is smaller."
            )
        if self.kind is LossKind.NOT_JUDGED:
            return (
                f"compute_loss was not compared on parts of a batch: {self.reason}. It must be a "
                "mean over samples or shoal.counted(sum, count); nothing has checked that it is."
            )
        if self.memory:
            return (
                "compute_loss computes with what it has kept of earlier samples: gradients of a "
                f"batch differ by {percent(self.memory)} after one half of it and after the other "
                "half. Each rank, and each micro-batch, would keep something of its own samples, "
                "where one device keeps it of all. Compute it from run.gather(tensor), or between "
                "the steps from the loss that run.forward_backward returns."
            )
        if self.own_numbers:
            return (
                f"ranks differ in {' and '.join(self.own_numbers)}, with which compute_loss "
                "computes. One device has one value: compute it from run.gather(tensor), or from "
                "the loss that run.forward_backward returns, or draw it by a torch.Generator that "
                "has the same seed on all ranks."
            )
        return f"compute_loss is a {self.kind.value} over samples, as far as this batch shows."

    def _objection(self) -> str:
        if self.kind is LossKind.SUM:
            return (
                "compute_loss is a sum over samples, no mean: the losses of parts of a batch add "
                "up to the loss of the whole, and n ranks would each take their sum for a mean. "
                "Divide it by the number of samples (len of the batch)."
            )
        if self.kind is LossKind.FAILS_ON_PARTS:
            return (
                "compute_loss is no mean over samples: it runs on "
                f"{self.sizes[-1]} samples and fails on {_listed(self.sizes[:-1])} of them with "
                f"{self.reason}. A state that has a row for each sample, such as a hidden state, "
                "must be an argument, so that it is divided with them."
            )
        return (
            f"compute_loss is no mean over samples: on {_listed(self.sizes[:-1])} of these "
            f"{self.sizes[-1]} samples it gives gradients that differ by "
            f"{percent(self.difference)} from those of all {self.sizes[-1]}."
        )


def _listed(sizes: tuple[int, ...]) -> str:
    return " and ".join(str(size) for size in sizes)


def percent(difference: float) -> str:
    """Return a relative difference as a text, such as "3 %"."""
    number = 100 * difference
    return f"{number:.0f} %" if number >= 1 else f"{number:.2g} %"


def end_trial() -> None:
    """End a trial if one is running; else do nothing. Nothing is announced.

    To be called first by functions that take part in communication, such as `run.gather`: whoever
    calls them knows that the samples of a batch influence one another.

    Raises: CannotTry: a trial is running.
    """
    if is_trial_running():
        raise CannotTry("")
