"""The search: every strategy line that is worth a comparison, its memory and its time.

      lines ─> checks without a model ─> each strategy's own `cost` ─> memory ─> simulated step
               "needs a multiple of 4"   "nothing can be cut"          "does not fit by 3.1 GiB"

Lines come from the options of the registered strategies, and refusals are the strategies' own
words. What does not fit is not simulated, and neither is what cannot be among the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

from shoal.costs.cluster import Cluster
from shoal.costs.machine import Machine
from shoal.costs.memory_peak import HeldBytes, peak
from shoal.costs.network import Network
from shoal.costs.step_cost import RankLayout, StepCost, one_rank
from shoal.costs.step_tasks import SegmentTimer, StepTime, least_seconds, step_time
from shoal.costs.work import ModelWork
from shoal.errors import ConfigError, StrategyRefused
from shoal.strategies import DATA, STRATEGIES, build_strategies, parse_line, precheck
from shoal.strategies.options import mesh_sizes

TURNS_BAND = 0.56
"""Share by which times of more ranks than cores were off at most: benchmarks/plan."""
DATASHEET_BAND = 0.85
"""Share for numbers of datasheets, for which nothing was measured: no less than any other."""
FEW_WORDS = 2
"""Strategies and options of a line that is compared for a model of very many segments."""
MANY_SEGMENTS = 500
IN_ONE_PROCESS = ("single", "dataparallel")
"""Ways that share out no batch among ranks. The second is there for comparison."""
COMPARED = 24
"""Times that are known before plans are left out which cannot be better."""
MEMORY_BAND = {"cpu": 0.03, "cuda": 0.08}
"""Share by which predicted memory was off at most: benchmarks/plan. An allocator needs room too."""
ALIKE, GUESSED_ALIKE = 0.05, 0.25
"""Share by which times differ that a prediction tells apart; of a machine that was not measured."""


@dataclass(frozen=True)
class Workload:
    """A model to be trained.

    Attributes:
        module: the model; its tensors may have no memory.
        accumulate: micro-batches of each rank's share.
        note: what must be done before a command of the plan can run; empty for nothing.
        is_loop_loss: the loop computes the loss, for `run.backward`.
        known: what strategies find by looking at the model, for plans of any ranks and batch.
    """

    model: ModelWork
    module: Any
    global_batch: int
    accumulate: int = 1
    note: str = ""
    is_loop_loss: bool = False
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Plan:
    """A strategy line, and what it is predicted to cost.

    Attributes:
        time: of a step; None where it does not fit, or is slower than many others.
        band: share by which the time may be wrong.
        least_s: seconds that a step takes at least, where it fits.
    """

    strategy: str
    step: StepCost
    memory: HeldBytes
    memory_limit: float
    time: StepTime | None
    band: float
    least_s: float = 0.0

    @property
    def missing_bytes(self) -> float:
        """Bytes by which it does not fit; 0 or less if it does."""
        return self.memory.total - self.memory_limit

    @property
    def is_tight(self) -> bool:
        """True if it may not fit, for the prediction of its memory may be too small."""
        band = MEMORY_BAND[self.step.device]
        return self.memory.total * (1 + band) > self.memory_limit

    @property
    def seconds(self) -> float:
        return self.time.seconds if self.time is not None else float("inf")

    @property
    def latest_s(self) -> float:
        """Seconds of a step if the prediction is too short by the whole band of its strategy.

        What is wrong with the numbers of a machine is wrong for all strategies, so it ranks none.
        Without a prediction, of the least time.
        """
        return (self.seconds if self.time is not None else self.least_s) / (1 - self.step.band)

    @property
    def samples_per_s(self) -> float:
        return self.step.global_batch / self.seconds


@dataclass(frozen=True)
class Plans:
    """The answer of a search.

    Attributes:
        fitting: best first, by `latest_s`.
        slower: fit, and cannot be among the best, so their times are not known.
        too_large: do not fit, nearest first.
        refused: strategy line -> reason.
        alike: share within which times are no reason to choose.
    """

    fitting: tuple[Plan, ...]
    slower: tuple[Plan, ...]
    too_large: tuple[Plan, ...]
    refused: dict[str, str]
    alike: float

    @property
    def best(self) -> Plan | None:
        """Return the plan to use: of those that are about as fast as the fastest, the simplest.

        It computes the numbers of one device, and has room to spare if any plan has. Predictions
        do not tell times apart that are within `alike`, so fewer strategies decide, and then the
        shorter line.
        """
        exact = [plan for plan in self.fitting if plan.step.is_exact]
        exact = [plan for plan in exact if not plan.is_tight] or exact
        alike = [plan for plan in exact if plan.latest_s <= exact[0].latest_s * (1 + self.alike)]
        return min(alike, key=complexity, default=None)


def complexity(plan: Plan) -> tuple[int, int, float]:
    """Return a key that sorts the simplest plan first: fewest strategies, then the shorter line."""
    return len(parse_line(plan.strategy).specs), len(plan.strategy), plan.seconds


class Planner:
    """Plans a workload on a cluster whose ranks are all alike.

    Args: memory_limit: bytes of each rank; None for what the cluster's hosts have.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        cluster: Cluster,
        memory_limit: float | None = None,
    ) -> None:
        self.workload = workload
        self.machine = machine
        self.cluster = cluster
        least = min(host.memory_bytes for host in cluster.hosts) or machine.memory_bytes
        self.memory_limit = least if memory_limit is None else memory_limit
        self.timer = SegmentTimer(machine, min(cluster.ranks_per_host, cluster.ranks))
        self.network = Network(machine, cluster)
        self._steps: dict[str, StepCost] = {}
        self._alike = ALIKE if machine.calibrated else GUESSED_ALIKE

    def search(self, lines: Sequence[str] | None = None) -> Plans:
        """Return the plans of some strategy lines; None for all that are worth a comparison.

        All that fit of given lines are simulated; else those that may be among the best.
        """
        found: list[Plan] = []
        refused: dict[str, str] = {}
        many = len(self.workload.model.segments) > MANY_SEGMENTS
        find = short_lines if many else candidate_lines
        for text in lines or list(find(self.cluster.ranks)):
            try:
                found.append(self._without_time(text))
            except (StrategyRefused, ConfigError) as error:
                refused[text] = str(error)
        too_large = sorted((p for p in found if p.missing_bytes > 0), key=lambda p: p.missing_bytes)
        enough = len(found) if lines else COMPARED
        fitting, slower = self._timed([p for p in found if p.missing_bytes <= 0], enough)
        fitting.sort(key=lambda p: (p.latest_s, p.memory.total))
        return Plans(tuple(fitting), tuple(slower), tuple(too_large), refused, self._alike)

    def _timed(self, plans: list[Plan], enough: int) -> tuple[list[Plan], list[Plan]]:
        """Simulate the plans that may be among the best; return them, and the others."""
        waiting = sorted(plans, key=lambda p: p.latest_s)
        timed: list[Plan] = []
        for number, plan in enumerate(waiting):
            ends = {p.latest_s for p in timed if p.step.is_exact}
            earlier = [end for end in ends if end <= plan.latest_s]
            if len(earlier) >= enough and plan.latest_s > min(ends) * (1 + self._alike):
                return timed, waiting[number:]
            timed.append(self._with_time(plan))
        return timed, []

    def plan(self, text: str) -> Plan:
        """Return what one strategy line costs.

        Raises: ConfigError, StrategyRefused: it cannot run; the reason that the strategy gives.
        """
        found = self._without_time(text)
        return self._with_time(found) if found.missing_bytes <= 0 else found

    def _without_time(self, text: str) -> Plan:
        step = self.step_cost(text)
        memory = peak(step)
        fits = memory.total <= self.memory_limit
        least_s = least_seconds(step, self.timer, self.network) if fits else 0.0
        band = step.band if self.machine.calibrated else DATASHEET_BAND
        if self.machine.crowding(self.cluster.ranks_per_host) > 1:
            band = max(band, TURNS_BAND)
        return Plan(text, step, memory, self.memory_limit, None, band, least_s)

    def _with_time(self, plan: Plan) -> Plan:
        return replace(plan, time=step_time(plan.step, self.timer, self.network))

    def step_cost(self, text: str) -> StepCost:
        """Return the step of a strategy line, transformed by each of its strategies in turn."""
        line = parse_line(text)
        ranks = self.cluster.ranks
        if problems := precheck.check(line, ranks):
            raise ConfigError(*problems)
        strategies = build_strategies(line)
        sizes = mesh_sizes(strategies)
        axes = sizes.get("tensor", 1), sizes.get("pipeline", 1)
        layout = RankLayout(ranks, *axes, hosts=len(self.cluster.hosts))
        work = self.workload
        if layout.data * work.accumulate > work.global_batch:
            raise StrategyRefused(
                f"batch {work.global_batch} cannot be cut for {layout.data} ranks"
                + (f" x {work.accumulate} micro-batches" if work.accumulate > 1 else "")
                + f". Give each a sample: a batch of {layout.data * work.accumulate} or more."
            )
        if layout.tensor > self.cluster.ranks_per_host:
            raise StrategyRefused(
                f"tensor={layout.tensor}: tensor groups lie inside one host, and a host has "
                f"{self.cluster.ranks_per_host} ranks."
            )
        done = str(layout)
        if done not in self._steps:
            self._steps[done] = one_rank(
                work.model,
                work.module,
                layout,
                work.global_batch,
                self.timer,
                work.accumulate,
                work.is_loop_loss,
                work.known,
            )
        step = self._steps[done]
        for spec, strategy in zip(line.specs, strategies, strict=True):
            done += f",{spec}"
            if done not in self._steps:  # many lines begin alike
                self._steps[done] = strategy.cost(step)
            step = self._steps[done]
        return replace(step, server_bytes=0.0) if self.cluster.server_hosts else step


def short_lines(ranks: int) -> Iterator[str]:
    """Yield the candidate lines of few words."""
    return (line for line in candidate_lines(ranks) if line.count(",") < FEW_WORDS)


def candidate_lines(ranks: int) -> Iterator[str]:
    """Yield the strategy lines that are worth a comparison on so many ranks.

    Each strategy says which of its variants these are. Strategies that divide the model or the
    work stand alone or together, before each way to share out the batch. Where one rank has all of
    the batch, there is nothing to share out.
    """
    dividing = [
        ["", *entry.options.variants(name, ranks)]
        for name, entry in STRATEGIES.items()
        if name not in DATA
    ]
    names = [name for name in DATA if name not in IN_ONE_PROCESS]
    sharing = [text for name in names for text in STRATEGIES[name].options.variants(name, ranks)]
    for parts in product(*dividing):
        words = [part for part in parts if part]
        data_ranks, rest = divmod(ranks, prod(map(_degree, words)))
        if rest == 0:
            for shared in sharing if data_ranks > 1 else ["ddp"]:
                # ddp is what a line means that names no way to share out the batch.
                line = ",".join([*words, shared]).removesuffix(",ddp")
                yield line if ranks > 1 or words else "single"


@cache
def _degree(text: str) -> int:
    """Return the product of the axes that a part of a line spans beside the data axis."""
    options = [spec.options for spec in parse_line(text).specs if spec.options is not None]
    return prod(size for axis, size in mesh_sizes(options).items() if axis != "dp_shard")
