"""The beginning of a run: rank, seed, and the order of strategies.

`init("auto")` takes the strategy that `shoal plan` recommends for the script that calls it:

      rank 0    shoal plan train.py -n 4 --json ── best ──┐
      others    wait                                       └─> every rank has the same line

The planner follows the script in a process of its own, so this one's model need not exist yet.
"""

from __future__ import annotations

import difflib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from shoal.comm.mesh import Mesh, init_mesh
from shoal.comm.parallel_dims import ParallelDims
from shoal.config.trace_window import parse_window
from shoal.errors import ConfigError, StrategyRefused, raise_problems
from shoal.launch.environment import STARTED_BY_RANK, RankInfo, own_place
from shoal.platform.torch_versions import untested
from shoal.run.guards import Guards
from shoal.run.preparation import Draws, Nonfinite, RunSettings
from shoal.run.prepared import Prepared
from shoal.run.run import Run
from shoal.run.startup_summary import log_line
from shoal.run.tracing import Tracing
from shoal.strategies import base, build_strategies, parse_line, text_of
from shoal.strategies.options import mesh_sizes
from shoal.strategies.transforms.accumulate import Accumulate
from shoal.strategies.transforms.compile import Compile
from shoal.strategies.transforms.global_draws import DrawGlobally
from shoal.strategies.transforms.precision import AUTOCAST, LossScale, Precision
from shoal.strategies.transforms.sync_batchnorm import SyncBatchNorm

PrecisionName = Literal["fp32", "fp64", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionName)
AUTO = "auto"
LIMIT = 2**63
"""Seeds and counts are below it: torch takes no larger integers."""
LARGEST_OWN_SEED = 1 << 40
"""Seeds of scripts are below it. A process that was not seeded has 64 random bits."""
_RUNS = count()


def init(
    strategy: str | Mapping[str, Any] = "ddp",
    *,
    seed: int = 0,
    accumulate: int = 1,
    precision: PrecisionName = "fp32",
    compile: bool = False,
    sync_batchnorm: bool = False,
    draws: Draws = "rank",
    trace: str | None = None,
    trace_to: str | Path = ".",
    nonfinite: Nonfinite = "skip",
    max_nonfinite: int = 10,
    guards: bool = True,
    announce: Callable[[str], None] = log_line,
    overrides: bool = True,
) -> Run:
    """Join the ranks that a launcher has started, and return the run. Collective: call it first.

    Rank and world size are read from the variables of `shoal launch`, torchrun, srun or mpirun. A
    plain `python script.py` is a world of one rank. Sets the current CUDA device if there are GPUs.
    Seeds torch, Python and NumPy alike on every rank, so that every rank builds the same model.

    Args:
        strategy: the way to train one model on several ranks, such as "tensor=2,zero1", or as a
            dict {"tensor": 2, "zero": 1}; `shoal launch --strategy` overrides it. "auto": the one
            that `shoal plan` recommends for this script, on the ranks of one machine.
        seed: decides the order of samples, augmentation and dropout.
        accumulate: micro-batches of each rank's share of a batch; more of them save memory.
        precision: "bf16" and "fp16" run the forward pass under autocast.
        compile: compile the model with torch.compile.
        sync_batchnorm: BatchNorm layers in training normalise over the samples of all ranks, on
            CPUs and GPUs, and so compute what they compute on one device.
        draws: "rank": each rank draws random numbers of its own, such as dropout masks. "global":
            inside of `forward_backward` it draws for the global batch and keeps its own rows, so
            the numbers are those of one device; this takes time.
        trace: steps to trace. "3@20" traces three, after the first twenty. `shoal launch --trace`
            overrides it.
        trace_to: directory of trace.json, which `shoal trace` reads and https://ui.perfetto.dev
            opens.
        nonfinite: reaction to a step in which the loss or a gradient of any rank is NaN or
            infinite. "skip": all ranks leave it out, and it is told with rank and parameter.
            "stop": the run ends. "ignore": it is taken.
        max_nonfinite: so many skipped steps in a row end the run.
        guards: False leaves out the checks that cost time in each step: of backward passes outside
            of `forward_backward`, of weights written between steps, of ranks whose learning rates
            differ, and of gradients that are not on this rank.
        announce: is called with each line of the startup summary and each note, on rank 0 only; by
            default `logging.getLogger("shoal")` is, which prints them.
        overrides: variables such as SHOAL_STRATEGY, which `shoal launch` sets, override arguments.
            False for a program whose settings are complete, such as `shoal train`, which also
            compares weights of ranks itself.

    Raises:
        EnvironmentConflict: the launcher's variables contradict each other.
        ConfigError: the strategy, the steps to trace or the kind of draws do not exist.
    """
    variables: Mapping[str, str] = os.environ if overrides else {}
    strategy = text_of(strategy) if isinstance(strategy, Mapping) else strategy
    strategy = variables.get("SHOAL_STRATEGY", strategy)
    accumulate = _integer_from(variables, "SHOAL_ACCUMULATE", accumulate)
    precision = variables.get("SHOAL_PRECISION", precision)  # type: ignore[assignment]
    draws = variables.get("SHOAL_DRAWS", draws)  # type: ignore[assignment]
    trace = variables.get("SHOAL_TRACE", trace)
    trace_to = variables.get("SHOAL_TRACE_TO", trace_to)
    # Settings are checked before ranks connect, so that a mistake ends all of them at once.
    given = strategy, seed, accumulate, precision, trace, draws, nonfinite, max_nonfinite
    raise_problems([*_problems(*given)])
    window = None if trace is None else parse_window(trace, "trace")
    # So is the line, but for that of the planner, which takes ranks that are connected.
    chosen = [] if strategy == AUTO else build_strategies(parse_line(strategy))
    place = own_place()
    if place.reason.startswith(STARTED_BY_RANK):
        announce(f"note: {place.describe()}")
    if place.rank == 0 and (untested_torch := untested(torch.__version__)):
        announce(f"note: {untested_torch}")
    if strategy == AUTO:
        mesh, strategy, chosen = _join_and_choose(place, announce)
    else:
        mesh = init_mesh(place, _needs_helpers(chosen), ParallelDims(**mesh_sizes(chosen)))
    _note_own_seed(place.rank, seed, announce)
    seed_generators(seed)
    loss_scale = LossScale() if precision == "fp16" else None
    # Tensor parallelism comes first, because it replaces layers. So precision wraps the forward
    # pass of a shard of the model, and accumulation wraps all passes. What must know how ranks
    # step comes after the strategy that says so.
    strategies: list[base.Strategy] = [
        *(strategy for strategy in chosen if strategy.needs_example_batch),
        Precision(precision, loss_scale),
        *([Compile()] if compile else []),
        *(strategy for strategy in chosen if not strategy.needs_example_batch),
        *([SyncBatchNorm()] if sync_batchnorm else []),
        Accumulate(accumulate),
        *([DrawGlobally(seed)] if draws == "global" else []),
    ]
    numbers = AUTOCAST.get(precision), loss_scale
    prepared = Prepared(
        mesh,
        strategies,
        RunSettings(seed, accumulate, draws, nonfinite, max_nonfinite, *numbers),
        announce if mesh.rank == 0 else base.no_op,
        None if window is None else Tracing(window, Path(trace_to), mesh),
        Guards(guards, strategy, compares_weights=overrides),
    )
    return Run(prepared)


init_with_place = partial(init, overrides=False)
"""`init` for `shoal train` and `shoal verify`: nothing may override their settings."""


def _join_and_choose(
    place: RankInfo, announce: Callable[[str], None]
) -> tuple[Mesh, str, list[base.Strategy]]:
    """Return the mesh for the planner's choice, and the choice. Collective."""
    mesh = init_mesh(place, True, ParallelDims())
    line, reason = choose_strategy(mesh)
    chosen = build_strategies(parse_line(line))
    if mesh.rank == 0:
        announce(reason)
    return mesh.divided(ParallelDims(**mesh_sizes(chosen)), _needs_helpers(chosen)), line, chosen


def choose_strategy(mesh: Mesh) -> tuple[str, str]:
    """Return the strategy line for this script, and a sentence with the reason. Collective.

    Raises:
        ConfigError: ranks on several hosts, or a program that is no file; or what `shoal plan`
            says of a script that it cannot follow.
        StrategyRefused: no strategy fits.
    """
    problem, answer = _why_no_script(mesh), ""
    if not problem and mesh.rank == 0:
        words = [sys.argv[0], "-n", str(mesh.size), "--json", "--", *sys.argv[1:]]
        variables = {**os.environ, "SHOAL_LAUNCHER": "single"}
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "plan", *words],
            env=variables,
            capture_output=True,
            text=True,
        )
        answer = done.stdout.strip().rpartition("\n")[2]
        problem = done.stderr.strip() if not answer.startswith("{") else ""
    problem, answer = mesh.broadcast_json((problem, answer))
    found = {} if problem else json.loads(answer)
    if problems := found.get("errors", [problem] if problem else []):
        raise ConfigError(*[f"strategy auto: {problem}" for problem in problems])
    plans = found["result"]
    if plans["best"] is None:
        raise StrategyRefused(plans["choice"])
    return plans["best"], plans["choice"]


def _why_no_script(mesh: Mesh) -> str:
    """Return why no script can be followed; "" if one can."""
    if mesh.place.local_world < mesh.size:
        return (
            "it chooses for ranks on one machine. `shoal plan train.py --cluster FILE` plans "
            "several hosts"
        )
    program = sys.modules["__main__"]
    if getattr(program, "__spec__", None) is not None or not Path(sys.argv[0]).is_file():
        return (
            "it follows a script from its file, and this program has none, such as "
            "`python train.py`. Write the strategy that `shoal plan` tells"
        )
    return ""


def _needs_helpers(chosen: Sequence[base.Strategy]) -> bool:
    """Return True if there must be a process from which helper processes are forked.

    It must start before there are threads and connections.
    """
    return any(strategy.needs_helper_processes for strategy in chosen)


def _note_own_seed(rank: int, seed: int, announce: Callable[[str], None]) -> None:
    """Note in the first run of a process if the script has seeded torch, which has no effect."""
    own = torch.initial_seed()
    is_first = next(_RUNS) == 0
    if is_first and rank == 0 and seed == 0 and 0 != own < LARGEST_OWN_SEED:
        announce(
            f"note: torch was seeded by {own} before shoal.init, which seeds all generators anew, "
            f"by seed=0. Give it yours: shoal.init(seed={own})."
        )


def seed_generators(seed: int) -> None:
    """Seed torch, Python and NumPy alike on every rank."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _integer_from(variables: Mapping[str, str], name: str, default: int) -> Any:
    """Return a variable as an integer, or the default if it is not set.

    Text that is no integer is returned as it is, for `_problems`.
    """
    text = variables.get(name)
    if text is None:
        return default
    return int(text) if text.lstrip("-").isdecimal() else text


def _problems(
    strategy: Any,
    seed: Any,
    accumulate: Any,
    precision: Any,
    trace: Any,
    draws: Any,
    nonfinite: Any,
    max_nonfinite: Any,
) -> Iterator[str]:
    """Yield a sentence for each argument that cannot be meant."""
    if not isinstance(strategy, str):
        yield f'strategy: {strategy!r} is no text such as "ddp" or "tensor=2,zero1"'
    yield from _problems_of_integer("seed", seed, 1 - LIMIT)
    yield from _problems_of_integer("accumulate", accumulate)
    if precision not in PRECISIONS:
        close = difflib.get_close_matches(str(precision), PRECISIONS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        yield f"precision: {precision!r} is none of {', '.join(PRECISIONS)}{hint}"
    if trace is not None and not isinstance(trace, str):
        yield f'trace: {trace!r} is no text such as "3@20"'
    if draws not in ("rank", "global"):
        yield f'draws: {draws!r} must be "rank" or "global"'
    yield from _problems_of_integer("max_nonfinite", max_nonfinite)
    if nonfinite not in ("skip", "stop", "ignore"):
        yield f'nonfinite: {nonfinite!r} must be "skip", "stop" or "ignore"'


def _problems_of_integer(name: str, value: Any, least: int = 1) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, int):
        yield f"{name}: {value!r} is no integer"
    elif not least <= value < LIMIT:
        above = " greater than 0, and" if least == 1 else ""
        yield f"{name}: {value} must be{above} below 2^63"
