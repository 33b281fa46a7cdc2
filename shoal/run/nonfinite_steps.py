"""Steps whose loss or gradients are not finite: known on all ranks at once, told, and skipped.

      passes ── look at this rank's gradients ── reduce ── verdict ──┬── finite: step
                        (a number in the totals, or one vote)        └── NaN: who? told; skip it

Where a strategy looks at gradients before it sends them, the rank is known; ddp and synchronous
servers send what they have found with the totals. Where ranks hold different gradients afterwards
(shards, stages), they vote. Ranks that step by themselves decide by themselves. Only a step that is
not finite costs more than a few microseconds.

                          .grad
      forward_backward    NaN            a sum with NaN stays NaN
      forward_backward    NaN + g        still to be skipped, although this call's g is finite
      optimizer.step()    None           set just before, so that the step changes nothing

`zero_grad()` in between removes it with the gradients. An overflow of fp16 is skipped in the same
way, without a word, for its scale becomes smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.errors import TrainingDiverged
from shoal.run.optimizer_binding import listed
from shoal.run.preparation import RunSettings
from shoal.strategies import base
from shoal.strategies.grad_checks import are_finite, nonfinite_names, read, seem_finite, sums_of
from shoal.strategies.transforms.precision import unscale

TOLD_NAMES = 3
"""Parameters of a rank that a note names; it counts the others."""
TOLD_STEPS = 10
"""Notes of a run that are all printed; after them those whose number is a power of two."""


class NonfiniteSteps:
    """Judges each step of a run, and lets all ranks skip it together.

    It outlives a second `prepare`, so that its counts go on.

    Args:
        mesh: all ranks.
        settings: with a loss scale only the loss is looked at.
        announce: prints a note, on rank 0.

    Attributes:
        is_finite: the last step was finite on all ranks, up to its last call.
        steps: steps that were judged. Calls that add up are one.
        skipped: those that were not finite.
        in_a_row: those at the end that were not.
    """

    def __init__(self, mesh: Mesh, settings: RunSettings, announce: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._settings = settings
        self._announce = announce
        self._loss_scale = settings.loss_scale
        self._skip_next = False
        self._has_stepped = True
        self._local_model: base.LocalModel | None = None
        # Every rank that takes the step has seen the same totals and gradients.
        self._agreed = False
        self.is_finite = True
        self.steps = 0
        self.skipped = 0
        self.in_a_row = 0

    @property
    def enabled(self) -> bool:
        """False if steps are taken whatever they are."""
        return self._settings.nonfinite != "ignore"

    def watch(self, local_model: base.LocalModel) -> None:
        """Judge the steps of this local model from now on."""
        self._local_model = local_model
        is_alone = self._mesh.size == 1 or not local_model.strategy_state.is_synchronous
        # Once, for it looks at each parameter.
        is_divided = local_model.is_partial or local_model.has_sharded_params
        self._agreed = is_alone or (self._mesh.data.size == self._mesh.size and not is_divided)
        local_model.finite_check.enabled = self.enabled and self._loss_scale is None

    def begin(self) -> Callable[[Tensor], None] | None:
        """Return what is to be called with the loss of each micro-batch of the step, if anything.

        Called first in each `forward_backward`.
        """
        if not self.enabled:
            return None
        check = self._model.finite_check
        check.begin()
        return check.losses.append

    def judge(
        self, totals: Tensor, numbers: list[float] | None, earlier: Collection[Tensor] = ()
    ) -> None:
        """Divide gradients by the loss scale, and decide if they may be used. Collective.

        Args:
            totals: (TOTALS_LENGTH,), of the step over all ranks that take it together.
            numbers: the totals as Python's numbers, where they are at hand.
            earlier: gradients of earlier calls before the same step, this call's not added.

        Raises: TrainingDiverged: on all ranks that take the step together, if the run is to end.
        """
        # `zero_grad` takes an earlier NaN along; else a sum with it stays NaN.
        skips = was_told = self._skip_next and not self._on_all_ranks(seem_finite(earlier))
        if self._loss_scale is not None and not unscale(self._model, self._loss_scale):
            skips = True
        self._skip_next = skips
        if not self.enabled:
            return
        self.steps += self._has_stepped or not earlier
        self._has_stepped = False
        check = self._model.finite_check
        looks = check.enabled and not check.has_looked
        # To ask for a gradient takes as long as to look at a small one: once is enough.
        reduced = (p.grad for p in self._model.trainable_params.values())
        sums = sums_of(g for g in reduced if g is not None) if looks else []
        unread = totals.unbind() if numbers is None else ()
        # On a device all is queued before the host waits, once.
        known: list[complex] = [*(numbers or ()), *read([*unread, *sums])]
        loss_is_finite = are_finite((known[base.LOSS_SUM], known[base.COUNT]))
        was_found = known[base.NONFINITE].real > 0 or check.found
        is_good = loss_is_finite and not was_found and are_finite(known[base.TOTALS_LENGTH :])
        finite = self._on_all_ranks(is_good)
        problems = [] if finite else self._problems(loss_is_finite)
        # A sum of large numbers may overflow where no gradient does: then there is no problem.
        self._skip_next = bool(problems) or skips
        self.is_finite = not (problems or was_told)  # whatever overflows in fp16
        if problems and not was_told:
            self._react(problems)
        elif self.is_finite:
            self.in_a_row = 0

    def check_weights(self) -> None:
        """Raise TrainingDiverged on every rank if a weight is not finite on any. Collective.

        A step by finite gradients can do that too, for example with too large a learning rate.
        """
        if not self.enabled or self._local_model is None:  # no step was taken yet
            return
        weights = {name: p.detach() for name, p in self._model.trainable_params.items()}
        names = [] if seem_finite(weights.values()) else nonfinite_names(weights)
        if not self._mesh.on_any_rank(bool(names)):
            return
        names_of_ranks = self._mesh.all_gather_json(names)
        bad = list(dict.fromkeys(name for of_rank in names_of_ranks for name in of_rank))
        raise TrainingDiverged(
            f"weights are not finite after step {self.steps}: {listed(bad, TOLD_NAMES)}. Go on "
            "from an earlier checkpoint with a lower learning rate."
        )

    @property
    def _model(self) -> base.LocalModel:
        assert self._local_model is not None
        return self._local_model

    def _on_all_ranks(self, finite: bool) -> bool:
        """Return True if it is finite on every rank that takes the step. Collective."""
        if self._agreed:
            return finite
        flag = torch.tensor([not finite], dtype=torch.float32, device=self._mesh.device)
        return not self._mesh.all_reduce_max(flag).item()

    def _problems(self, loss_is_finite: bool) -> list[str]:
        """Return a phrase for each rank on which something is not finite. Collective.

        The list is empty if only sums of finite numbers have overflowed.
        """
        check, owned = self._model.finite_check, self._model.trainable_params
        loss = next((value for value in check.losses if not bool(torch.isfinite(value))), None)
        gradients = {name: parameter.grad for name, parameter in owned.items()}
        after = [] if not check.enabled else nonfinite_names(gradients)
        mine = {
            "loss": None if loss is None else str(loss.item()),
            "before": [name for name in dict.fromkeys(check.names) if name in owned],
            "found": check.found,
            "after": after,
        }
        is_alone = not self._model.strategy_state.is_synchronous
        return _phrases(
            [mine] if is_alone else self._mesh.all_gather_json(mine),
            first_rank=self._mesh.rank if is_alone else 0,
            loss_is_finite=loss_is_finite,
        )

    def _react(self, problems: list[str]) -> None:
        self.skipped += 1
        self.in_a_row += 1
        fact = f"step {self.steps} is not finite: {'; '.join(problems)}"
        cure = "Look at the data and the loss there, or lower the learning rate"
        if self._settings.nonfinite == "stop":
            raise TrainingDiverged(f"{fact}. No rank has taken the step. {cure}.")
        if self.in_a_row >= self._settings.max_nonfinite:
            raise TrainingDiverged(
                f"{fact}. It is number {self.in_a_row} in a row, and the run ends; no rank has "
                f"taken these steps. {cure}."
            )
        if self.skipped <= TOLD_STEPS or self.skipped & (self.skipped - 1) == 0:
            all_ranks = " on all ranks" if self._mesh.size > 1 else ""
            self._announce(f"note: {fact}; it is skipped{all_ranks} ({self.skipped} so far)")

    def before_optimizer_step(self) -> None:
        """Remove the gradients of a step that is to be skipped: optimizers leave parameters without
        one as they are, with their state.
        """
        if self._skip_next:
            if self._model.remote_optimizer is not None:
                self._model.remote_optimizer.leave_out()
            for parameter in self._model.trainable_params.values():
                parameter.grad = None
        self._skip_next = False
        self._has_stepped = True


def _phrases(reports: Sequence[Any], first_rank: int, loss_is_finite: bool) -> list[str]:
    """Return what was not finite, by rank, as far as that is known."""
    ranks = [*enumerate(reports, start=first_rank)]
    phrases = []
    for rank, report in ranks:  # what each saw before gradients were averaged
        if report["loss"] is not None:
            phrases.append(f"the loss of rank {rank} is {report['loss']}")
        if report["before"]:
            named = listed(report["before"], TOLD_NAMES)
            phrases.append(f"the gradient of {named} on rank {rank}")
    everywhere = list(dict.fromkeys(name for report in reports for name in report["after"]))
    if not phrases and not everywhere and loss_is_finite:
        return []
    if everywhere and not any(report["before"] for report in reports):
        sources = [rank for rank, report in ranks if report["found"]]
        if not sources and not all(report["after"] for report in reports):
            # Shards and stages are on some ranks only. What all have says nothing of its source.
            sources = [rank for rank, report in ranks if report["after"]]
        where = f" of rank {', '.join(map(str, sources))}" if sources else ""
        phrases.append(f"the gradient of {listed(everywhere, TOLD_NAMES)}{where}")
    return phrases or ["the loss"]
