"""Properties of optimizers: does a step look at each number, each parameter, or all together?

elementwise      may step shards of a parameter, and the flat pieces on parameter servers
parameterwise    may step some of the parameters, as the stages of a pipeline do
neither          needs all parameters whole: LBFGS, or a norm over all gradients

torch's classes are listed; a class of a script or of another library says so by a class attribute
of these names. Nothing steps a copy of it to find out: a copy may share a schedule, counters or
files with the optimizer that trains.
"""

from __future__ import annotations

from torch.optim import Optimizer

ELEMENTWISE_OPTIMIZERS = (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam",
    "RMSprop", "Rprop",
)  # fmt: skip
PARAMETERWISE_OPTIMIZERS = ("Adafactor", "Muon", "SparseAdam")
"""Classes of torch that look at whole parameters, one by one."""


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return True if an optimizer of this class steps each number of a parameter by itself."""
    return _is_listed(kind, ELEMENTWISE_OPTIMIZERS) or bool(getattr(kind, "elementwise", False))


def is_parameterwise(kind: type[Optimizer]) -> bool:
    """Return True if an optimizer of this class steps each parameter without the other ones."""
    is_listed = _is_listed(kind, PARAMETERWISE_OPTIMIZERS)
    return is_listed or bool(getattr(kind, "parameterwise", False)) or is_elementwise(kind)


def declaration(kind: type[Optimizer], attribute: str) -> str:
    """Return the sentence that tells how a class says of itself that it is `attribute`.

    Empty for a class of torch, whose answer is known.
    """
    if kind.__module__.startswith("torch.optim"):
        return ""
    what = "each number" if attribute == "elementwise" else "each parameter"
    return (
        f"If it steps {what} by itself, say so before prepare: {kind.__name__}.{attribute} = True. "
    )


def _is_listed(kind: type[Optimizer], names: tuple[str, ...]) -> bool:
    # A subclass may have a step of its own, so it is not its parent.
    return kind.__module__.startswith("torch.optim") and kind.__name__ in names
