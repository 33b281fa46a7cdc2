"""The result of a comparison: the first difference, the class of its cause, and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["batches", "start", "forward", "loss", "backward", "update", "buffers", "files"]
"""Phases in their order; "batches" and "start" lie before the first step, "files" after the last.
"""

CauseClass = Literal[
    "scale",  # all gradients are the same multiple
    "missing reduction",  # ranks step with gradients of their own
    "weights of samples",  # samples count otherwise than on one device
    "same samples",  # all ranks compute the same ones, each on its own
    "wrong gradient",  # a module's backward pass, or what becomes of its gradient
    "missing gradient",  # a parameter has none, or zeros
    "wrong output",  # a module's forward pass
    "loss",  # outputs are right and the loss is not
    "update",  # gradients are right and the new weights are not
    "not updated",  # a parameter that the optimizer does not step
    "ranks apart",  # ranks began with other weights
    "batch statistics",  # BatchNorm over what one rank sees
    "random numbers",  # other draws
    "buffer",  # a buffer that depends on a rank's samples
    "wrong buffer",  # a buffer that is wrong and the same on all ranks
    "file",  # all steps are right, and a file that the script wrote is not
    "own steps",  # each rank steps by itself for a while
    "none",
]
ScriptVerdict = Literal["exact", "differs by design", "differs", "refused", "nothing compared"]
BY_DESIGN = ("batch statistics", "random numbers", "buffer", "own steps")


@dataclass(frozen=True)
class ScriptDifference:
    """A tensor that differs from that of one process.

    Attributes:
        step: from 1.
        phase: where in the step.
        module: the module's name; "" is the model itself; None: no module.
        parameter: the name of the parameter, buffer or file; None: an output, or a loss.
        error: relative to the largest entry of the tensor of one process.
        allowed: the tolerance that it exceeds.
        line: the user's line, "train.py:31"; "" where none is known.
    """

    step: int
    phase: Phase
    module: str | None
    parameter: str | None
    error: float
    allowed: float
    line: str = ""

    @property
    def what(self) -> str:
        """Return words for it: "step 2, backward, layers.1.proj.weight"."""
        if self.phase == "batches":
            return "the samples of the ranks"
        name = self.parameter or ("the loss" if self.phase == "loss" else self.module)
        if name is None:
            name = "the gradient of the loss"
        return f"step {self.step}, {self.phase}, {name or 'the model'}"


@dataclass(frozen=True)
class ScriptCause:
    """The likely cause of the first difference.

    Attributes:
        kind: its class.
        sentence: one sentence for the user.
        factor: of the gradients, where the class has one.
        parameters: the parameters concerned, where they are not all.
    """

    kind: CauseClass
    sentence: str
    factor: float | None = None
    parameters: tuple[str, ...] = ()


NO_CAUSE = ScriptCause("none", "")


@dataclass(frozen=True)
class ScriptReport:
    """The result of running a script on many ranks and in one process.

    Attributes:
        verdict: "exact": all within the tolerance. "differs by design": the first difference has
            a reason that no strategy can mend. "differs". "refused": Shoal did not accept the
            script. "nothing compared": the script took no step, or starts no
            process group, and its ranks differ.
        ranks: of the run on many.
        steps, files: that were compared; files of tensors, once all steps are equal.
        first: the first difference; None where there is none.
        cause: the likely cause of it.
        largest: the largest relative error of all, also within the tolerance.
        layers: for the step of the first difference, or the last: (module, forward error, error
            of its parameters' gradients), in the order of execution; None where not compared.
        others: further differences of the same step.
        notes: lines for the user.
    """

    verdict: ScriptVerdict
    ranks: int
    steps: int = 0
    first: ScriptDifference | None = None
    cause: ScriptCause = NO_CAUSE
    largest: float | None = None
    layers: list[tuple[str, float | None, float | None]] = field(default_factory=list)
    others: list[ScriptDifference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0

    @property
    def exit_code(self) -> int:
        """Return 0: exact; 1: differs, by design or not; 2: refused, or nothing compared."""
        return {"exact": 0, "differs": 1, "differs by design": 1}.get(self.verdict, 2)

    def to_json(self) -> dict[str, Any]:
        """Return values for JSON. An error that is infinite or NaN is None."""
        first = self.first
        return {
            **vars(self),
            "first": first and {**vars(first), "error": finite(first.error), "what": first.what},
            "cause": vars(self.cause),
            "largest": finite(self.largest),
            "layers": [
                {"module": name, "forward": finite(forward), "gradient": finite(gradient)}
                for name, forward, gradient in self.layers
            ],
            "others": [{"what": o.what, "error": finite(o.error)} for o in self.others],
        }

    def __str__(self) -> str:
        """Return lines for the user: notes, the first difference, its cause, the verdict."""
        lines = [f"note: {note}" for note in self.notes]
        if self.first is not None:
            at = f" ({self.first.line})" if self.first.line else ""
            lines.append(f"first: {self.first.what}{at}: relative error {self.first.error:.1e}")
        if self.cause.sentence:
            lines.append(f"cause: {self.cause.kind}: {self.cause.sentence}")
        size = "" if self.largest is None else f": largest relative error {self.largest:.1e}"
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        files = f" and {self.files} file{'s' if self.files > 1 else ''}" if self.files else ""
        lines.append(f"{ranks}, {self.steps} steps{files}: {self.verdict}{size}")
        return "\n".join(lines)


def finite(error: float | None) -> float | None:
    """Return an error; None for one that is infinite or NaN."""
    return error if error is not None and math.isfinite(error) else None
