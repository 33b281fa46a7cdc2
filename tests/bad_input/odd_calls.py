"""Odd calls of a run's methods, and of the functions beside it. Each is refused by Shoal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import ShoalError

HUGE = 10**21
NAN = float("nan")
Call = Callable[[], Any]
FOREIGN_WORDS = ("Traceback", "KeyError", "object has no attribute", "Errno", "aten::", "TypeError")


class Script:
    """A script under ddp that has taken a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.run = shoal.init("ddp", announce=lambda _: None)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run.prepare(self.model, self.optimizer)
        self.x, self.y = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
        self.step(self.compute_loss)

    def compute_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def step(self, compute_loss: Any, **named: Any) -> None:
        self.optimizer.zero_grad()
        self.run.forward_backward(compute_loss, self.x, self.y, **named)

    def returns(self, value: Any) -> Call:
        """Return a step whose function of the batch returns this."""
        return lambda: self.step(lambda x, y: value(x, y) if callable(value) else value)


def calls(script: Script) -> Iterator[tuple[str, Call]]:
    """Yield all calls of the table, by a text for messages."""
    yield from _passes(script)
    yield from _losses(script)
    yield from _methods(script)
    yield from _functions()


def _passes(script: Script) -> Iterator[tuple[str, Call]]:
    run, x, y, loss = script.run, script.x, script.y, script.compute_loss
    for value in (None, 3, "loss", torch.ones(()), [loss], b"x", {}):
        yield f"forward_backward({value!r})", lambda value=value: run.forward_backward(value, x, y)
    for rows in (-1, 1.5, "4", True, NAN, [4], HUGE, torch.tensor(4)):
        yield f"rows={rows!r}", lambda rows=rows: script.step(loss, rows=rows)
    for reduction in (None, "", "mean", 3, True, ["rows"], b"rows"):
        yield f"reduction={reduction!r}", lambda it=reduction: script.step(loss, reduction=it)
    for batch in ((), (None,), (3,), ("x",), ([],), ({},), (x, torch.ones(3)), (torch.ones(()),)):
        shown = f"batch={batch!r}"
        yield shown, lambda it=batch: run.forward_backward(lambda *_: loss(x, y), *it)
    yield "a model as a batch", lambda: run.forward_backward(loss, script.model, y)
    yield "an optimizer as a batch", lambda: run.forward_backward(loss, script.optimizer, y)


def _losses(script: Script) -> Iterator[tuple[str, Call]]:
    for value in (None, 3, 0.5, "loss", [], {}, (), True, torch.ones(3), torch.ones(())):
        yield f"the loss {value!r}", script.returns(value)
    computed: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "of a row each": lambda x, y: F.cross_entropy(script.model(x), y, reduction="none"),
        "detached": lambda x, y: script.compute_loss(x, y).detach(),
        "of integers": lambda x, y: script.model(x).argmax(),
        "complex": lambda x, y: script.compute_loss(x, y) * 1j,
        "in a list": lambda x, y: [script.compute_loss(x, y)],
        "in a dict": lambda x, y: {"loss": script.compute_loss(x, y)},
        "of three parts": lambda x, y: (script.compute_loss(x, y), 1, 2),
        "as a number": lambda x, y: script.compute_loss(x, y).item(),
    }
    for name, value in computed.items():
        yield f"a loss {name}", script.returns(value)


def _methods(script: Script) -> Iterator[tuple[str, Call]]:
    run, model = script.run, script.model
    for norm in (None, "1", -1, NAN, True, [1.0], {}, 1j, float("-inf"), torch.ones(2)):
        yield f"clip_gradients({norm!r})", lambda norm=norm: run.clip_gradients(norm)
    for kind in (None, "2", 1, 0, -1, NAN, True, [2], float("-inf"), torch.tensor(2.0)):
        yield f"norm_type={kind!r}", lambda kind=kind: run.clip_gradients(1.0, norm_type=kind)
    for tensor in (None, 3, "x", [1], torch.ones(()), {"x": torch.ones(2)}, model):
        yield f"gather({tensor!r})", lambda tensor=tensor: run.gather(tensor)
    for batch in (None, 3, "x", [], {}, (), torch.ones(()), (torch.ones(4), torch.ones(3)), model):
        yield f"share({batch!r})", lambda batch=batch: run.share(batch)
    yield "prepare()", run.prepare
    for thing in (3, "x", b"x", {}, torch.ones(1), nn.Linear, print, HUGE):
        yield f"prepare({thing!r})", lambda thing=thing: run.prepare(thing)
    other = nn.Linear(2, 2)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    yield "prepare(an optimizer of another model)", lambda: run.prepare(stranger)
    for path in (None, 3, "", "/dev/null/x.pt", "/", [], b"x.pt", "x\0y"):
        yield f"save({path!r})", lambda path=path: run.save(path)
    good = list(zip(script.x.split(2), script.y.split(2), strict=True))
    for sums in (None, 3, "x", script.x):
        yield f"evaluate({sums!r})", lambda sums=sums: run.evaluate(sums, good)
    for loader in (None, 3, script.x, "x"):
        yield f"evaluate over {loader!r}", lambda it=loader: run.evaluate(lambda *_: {}, it)
    for answer in (None, 3, {"a": "x"}, {"a": torch.ones(2)}, {3: 1.0}, [1.0]):
        yield f"sums {answer!r}", lambda it=answer: run.evaluate(lambda *_: it, good)
    yield "evaluate with a string", lambda: run.evaluate(lambda *_: {"a": 1.0}, good, "model")
    for state in ((None, None, None), ({}, {}, {}), ({"x": 3}, {"step": 1}, {}), ("a", "b", "c")):
        yield f"load_state{state!r}", lambda it=state: run.load_state(*it)
    yield "rows before gather", lambda: run.rows


def _functions() -> Iterator[tuple[str, Call]]:
    loss = torch.ones(())
    for total in (None, 3, "x", torch.ones(2), [loss]):
        yield f"counted({total!r}, 1)", lambda total=total: shoal.counted(total, 1)
    wrong = (None, "x", [1], torch.ones(2), torch.ones((), requires_grad=True), -1, NAN, {}, 1j)
    for count in wrong:
        yield f"counted(loss, {count!r})", lambda count=count: shoal.counted(loss, count)
    for addend in ("x", None, [1], 3):
        yield f"counted + {addend!r}", lambda addend=addend: shoal.counted(loss, 1) + addend
    for factor in ("x", None, [1]):
        yield f"counted * {factor!r}", lambda factor=factor: shoal.counted(loss, 1) * factor
    for value in (None, "x", [1], {}, object()):
        yield f"summed({value!r})", lambda value=value: shoal.summed(value)
    for keep in (0, -1, "3", None, 1.5, True):
        yield f"Checkpoints(keep={keep!r})", lambda it=keep: shoal.Checkpoints(Path("c"), it)
    functions = (_linear, _batch, F.cross_entropy)
    for place in range(3):
        for value in (None, 3, "x"):
            given = [*functions[:place], value, *functions[place + 1 :]]
            yield f"verify({place}: {value!r})", lambda given=given: shoal.verify(*given)
    yield "verify(a lambda)", lambda: shoal.verify(lambda: nn.Linear(3, 2), *functions[1:])
    named: dict[str, tuple[Any, ...]] = {
        "strategy": (None, 3, "", "nonsense", "tensor=0", ["ddp"]),
        "ranks": (0, -1, None, "2", 1.5, True, HUGE),
        "steps": (0, -1, None, "2", 1.5, True),
        "accumulate": (0, -1, None, "2", 1.5, True),
        "tolerance": (None, "x", -1.0, NAN, True, float("inf")),
    }
    for name, values in named.items():
        for value in values:
            given = {name: value}
            yield f"verify({given})", lambda given=given: shoal.verify(*functions, **given)


def _linear() -> nn.Module:
    return nn.Linear(3, 2)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


def objections(script: Script) -> tuple[int, list[str]]:
    """Return the number of calls, and a line for each that is not refused as it should be."""

    lines, count = [], 0
    for name, call in calls(script):
        count += 1
        try:
            result = call()
        except ShoalError as error:
            said = str(error)
            foreign = [word for word in FOREIGN_WORDS if word in said and word not in name]
            if foreign or not said or len(said) > 1000:
                lines.append(f"{name}: {said[:200]!r} has the words {foreign}")
        except Exception as error:  # noqa: BLE001 (that is what is looked for)
            lines.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            lines.append(f"{name}: not refused, and gave {str(result)[:100]}")
    return count, lines
