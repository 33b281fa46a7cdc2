"""Runs scripts under a layout and judges each: exact, by design, refused, or a defect."""

from __future__ import annotations

import faulthandler
import hashlib
import io
import os
import pickle
import random
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import shoal
from shoal.errors import CollectiveFailed, LaunchError, ShoalError
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.strategies.loss_terms import Summed
from shoal.testing import world
from tests.ablation.checks import WITHOUT, switch_off
from tests.scripts.script import Result, Script, script_named

FORM = "SHOAL_TEST_FORM"
"""Set to "loop": scripts compute their losses in the loop and call `run.backward`."""
CHECKS = "SHOAL_TEST_CHECKS"
"""Set to "off": runs have no guards and no trials."""
SCRIPT_S = float(os.environ.get("SCRIPT_S", "40"))
"""A script that takes longer hangs: it takes a tenth of a second on an idle machine."""
OTHER_RANKS_S = 5.0

EXACT, BY_DESIGN, UNCHECKED, REFUSED = "exact", "by design", "unchecked", "refused"
SILENT, FOREIGN, HANG = "SILENT", "FOREIGN", "HANG"
DEFECTS = (SILENT, FOREIGN, HANG)
UNCHECKED_NOTES = ("nothing has checked that it is", "looked at the loss's graph alone")
"""Said of a loss that could not be compared on parts of a batch, and of one of the loop."""


class Layout(NamedTuple):
    """A strategy on a number of ranks."""

    strategy: str
    ranks: int
    accumulate: int = 1

    def __str__(self) -> str:
        accumulated = f" x {self.accumulate} accumulated" if self.accumulate > 1 else ""
        return f"{self.strategy} on {self.ranks}{accumulated}"


LAYOUTS = [
    Layout("single", 1),
    Layout("ddp", 2),
    Layout("ddp", 3),
    Layout("ddp", 2, 2),
    Layout("zero1", 2),
    Layout("zero2", 2),
    Layout("zero3", 2),
    Layout("zero3,hybrid=2", 4),
    Layout("tensor=2", 2),
    Layout("pipeline=2", 2),
    Layout("pipeline=2,ddp", 4),
    Layout("recompute,ddp", 2),
    Layout("server=1", 2),
    Layout("local=2", 2),
    Layout("diloco=2", 2),
]


class Outcome(NamedTuple):
    """The end of a script on one rank."""

    kind: str  # "ran", "refused", FOREIGN or HANG
    text: str = ""
    losses: tuple[float, ...] = ()
    weights: dict[str, Tensor] | None = None
    notes: tuple[str, ...] = ()
    secondary: bool = False  # of a refusal: it only says that another rank has gone
    generators: str = ""  # digest of the states of torch's, NumPy's and Python's generators


class Cell(NamedTuple):
    """The verdict of a script under a layout.

    Attributes:
        text: of a refusal, of the note, or of the defect.
        error: the largest relative error; 0 where nothing was compared.
    """

    verdict: str
    text: str = ""
    error: float = 0.0


def judge_all(names: Sequence[str], layout: Layout) -> dict[str, Cell]:
    """Run scripts under a layout, and return the verdict of each."""
    return {
        name: judge(script_named(name), reference(name), outcomes)
        for name, outcomes in run_all(names, layout).items()
    }


def run_all(names: Sequence[str], layout: Layout) -> dict[str, list[Outcome]]:
    """Run scripts under a layout, and return the outcomes of each on all ranks.

    Scripts share a world as long as all goes well; after anything else the next one gets a new
    world.
    """
    found: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        remaining = list(names)
        while remaining:
            lost = _run_world(remaining, layout, folder)
            done = [name for name in remaining if any(folder.glob(f"{name}.*"))] or remaining[:1]
            for name in done:
                found[name] = [
                    _read(folder / f"{name}.{rank}", lost) for rank in range(layout.ranks)
                ]
            remaining = [name for name in remaining if name not in found]
    return found


def _run_world(names: Sequence[str], layout: Layout, folder: Path) -> str:
    """Run scripts in one world. Returns how it failed, or an empty text."""
    limit_s = SCRIPT_S * (len(names) + 1)
    try:
        with world.start(layout.ranks, _run_scripts, names, layout, folder, timeout_s=limit_s) as w:
            w.wait()
    except LaunchError as error:
        return str(error)
    return "\n".join(failure.describe(layout.ranks) for failure in w.failures)


def _read(file: Path, lost: str) -> Outcome:
    if not file.exists():
        return Outcome(FOREIGN, f"the rank ended: {lost[-2000:]}", secondary=True)
    return pickle.loads(file.read_bytes())


_references: dict[str, Result] = {}


def reference(name: str) -> Result:
    """Return the result of the plain script; computed once in a process."""
    if name not in _references:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        try:
            losses, weights = script_named(name).plain()
        finally:
            torch.set_default_dtype(torch.float32)
        copies = {key: value.detach().clone() for key, value in weights.items()}
        _references[name] = [torch.as_tensor(loss).item() for loss in losses], copies
    return _references[name]


def _run_scripts(names: Sequence[str], layout: Layout, folder: Path) -> None:
    """Run scripts one after the other on this rank, until one does not end well on every rank."""
    switch_off(os.environ.get(WITHOUT, ""))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rank = torch.distributed.get_rank()
    for name in names:
        outcome = _run_script(name, layout, folder / f"{name}.{rank}")
        _write(folder / f"{name}.{rank}", outcome)
        files = [folder / f"{name}.{r}" for r in range(layout.ranks)]
        if not _all_ran(files) or needs_own_world(layout):
            return


def needs_own_world(layout: Layout) -> bool:
    """Return True where a run leaves helper processes behind that the next one must not meet."""
    return "server" in layout.strategy


def _all_ran(files: Sequence[Path]) -> bool:
    """Wait for the outcomes of all ranks, and return True if the script ran on each."""
    deadline_s = time.monotonic() + OTHER_RANKS_S
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.002)
    return all(_read(file, "").kind == "ran" for file in files)


def _run_script(name: str, layout: Layout, file: Path) -> Outcome:
    notes: list[str] = []
    watchdog = threading.Timer(SCRIPT_S, _give_up, args=(file,))
    watchdog.daemon = True
    watchdog.start()
    torch.manual_seed(0)
    try:
        run = shoal.init(
            # A cut by measured times differs from run to run, and with it what is refused.
            layout.strategy.replace("pipeline=2", "pipeline=2,balance=parameters"),
            accumulate=layout.accumulate,
            precision="fp64",
            announce=notes.append,
            guards=os.environ.get(CHECKS) != "off",
        )
        if os.environ.get(FORM) == "loop":
            run.forward_backward = partial(_backward, run)  # type: ignore[method-assign]
        losses, weights = script_named(name).with_shoal(run)
        copies = {key: value.detach().clone() for key, value in weights.items()}
        values = tuple(torch.as_tensor(loss).item() for loss in losses)
        notes = [line for line in notes if line.startswith("note: ")]
        return Outcome("ran", "", values, copies, tuple(notes), generators=generator_digest())
    except ShoalError as error:
        secondary = isinstance(error, CollectiveFailed)
        text = f"{type(error).__name__}: {error}"
        return Outcome("refused", text, secondary=secondary, notes=tuple(notes))
    except BaseException:  # noqa: BLE001 - whatever it is, it is what a user would see
        return Outcome(FOREIGN, traceback.format_exc())
    finally:
        watchdog.cancel()


def generator_digest() -> str:
    """Return a digest of the states of all generators of this process."""
    states = torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate()
    return hashlib.sha256(repr(states).encode()).hexdigest()


def _backward(
    run: shoal.Run, compute_loss: Any, *batch: Any, reduction: str = "rows", **named: Any
) -> Any:
    """Take the step of `forward_backward` as a loop does that computes its loss itself."""
    rows = named.pop("rows", None)
    loss, more = None, None
    if reduction == "rows":
        result = compute_loss(*batch, **named)
        loss, more = result if isinstance(result, tuple) else (result, None)
    if loss is None or any(isinstance(leaf, Summed) for leaf in tree_leaves(more)):
        return shoal.Run.forward_backward(
            run, compute_loss, *batch, rows=rows, reduction=reduction, **named
        )
    mean = run.backward(loss, rows=rows)
    if more is None:
        return mean
    return mean, tree_map_only(Tensor, Tensor.detach, more)


def _give_up(file: Path) -> None:
    """Write where every thread stands, and end this rank."""
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.dump_traceback(stacks)
        stacks.seek(0)
        _write(file, Outcome(HANG, stacks.read()))
    os._exit(1)


def _write(file: Path, outcome: Outcome) -> None:
    buffer = io.BytesIO()
    pickle.dump(outcome, buffer)
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_bytes(buffer.getvalue())
    unfinished.rename(file)


def judge(script: type[Script], expected: Result, outcomes: Sequence[Outcome]) -> Cell:
    """Return the verdict from the outcomes of all ranks."""
    primary = [outcome for outcome in outcomes if not outcome.secondary]
    for kind in (FOREIGN, REFUSED, HANG):
        for outcome in primary:
            if outcome.kind == kind:
                return Cell(kind, outcome.text)
    if len(primary) < len(outcomes):  # ranks lost one another, and none says why
        return Cell(FOREIGN, next(outcome.text for outcome in outcomes if outcome.secondary))
    # Refusals are made on all ranks; a rank that goes on alone would have been a HANG.
    errors = [largest_error(expected, outcome) for outcome in outcomes]
    worst = max(errors)
    if worst[0] <= script.tolerance:
        return Cell(EXACT, error=worst[0])
    notes = [note for outcome in outcomes for note in outcome.notes if announces(note, script)]
    if notes:
        return Cell(BY_DESIGN, "\n".join(dict.fromkeys(notes)), worst[0])
    told = [note for outcome in outcomes for note in outcome.notes]
    unchecked = [note for note in told if any(words in note for words in UNCHECKED_NOTES)]
    if unchecked and {*script.needs} & {*"CG"}:
        return Cell(UNCHECKED, unchecked[0], worst[0])
    others = "".join(f"; {note}" for note in told)
    return Cell(SILENT, f"{worst[1]} differs by {worst[0]:.1e}{others}", worst[0])


def announces(note: str, script: type[Script]) -> bool:
    """Return True if a note says why the numbers of this script are not those of one device.

    A note on random numbers excuses only a script that draws some, one on batch statistics only a
    script that has them, one on padding only a script of uneven samples.
    """
    if "same distribution" in note:
        return "R" in script.needs
    if "BatchNorm" in note or "buffer" in note:
        return "B" in script.needs
    if "collate_fn has made rows" in note:
        return "V" in script.needs
    if "labels below 0 have come" in note:
        return "C" in script.needs
    return any(word in note for word in ("not exact", "by design", "differ", "stale"))


def largest_error(expected: Result, outcome: Outcome) -> tuple[float, str]:
    """Return the largest relative error of a rank, and of what it is."""
    losses, weights = expected
    assert outcome.weights is not None
    if set(weights) != set(outcome.weights):
        names = sorted(set(weights) ^ set(outcome.weights))
        return float("inf"), f"the names of the weights: {', '.join(names)[:200]}"
    if len(losses) != len(outcome.losses):
        return float("inf"), f"the number of losses, {len(outcome.losses)} for {len(losses)},"
    pairs: list[tuple[str, Any, Any]] = [
        (f"the loss of step {i}", a, b)
        for i, (a, b) in enumerate(zip(losses, outcome.losses, strict=True))
    ]
    pairs += [(name, weights[name], outcome.weights[name]) for name in weights]
    return max(((relative_error(a, b), name) for name, a, b in pairs), key=lambda pair: pair[0])


def relative_error(expected: Any, value: Any) -> float:
    """Return the largest difference, relative to the largest value; inf for NaN.

    Values below a millionth are compared as such: a bias whose gradient is 0 holds rounding errors.
    """
    a, b = torch.as_tensor(expected), torch.as_tensor(value)
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.to(torch.float64), b.to(torch.float64)
    error = ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
    return error if error == error else float("inf")


def defects(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.verdict in DEFECTS]
