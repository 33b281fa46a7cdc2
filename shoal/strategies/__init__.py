"""Strategies by name, and the one line that chooses them: `ddp`, `zero3,hybrid=2`,
`recompute=2,zero3,offload=true`.

A new strategy is one file, one line in `STRATEGIES`, one row in the conformance table of the tests;
its options are a class in `options.py`. One that is not ours is named by its class,
`my_module:MyStrategy`. This module imports no torch: a wrong name, option or value is said before
any process is started.

      text ── parse_line ──> StrategyLine ── build_strategies ──> list[Strategy]
              once            what checks                          in a rank, where
              a process       are given                            there is torch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from shoal.errors import ConfigError, did_you_mean
from shoal.strategies import options

if TYPE_CHECKING:
    from shoal.strategies.base import Strategy


class StrategyEntry(NamedTuple):
    """One of our strategies."""

    where: str  # file:Class
    options: type[options.StrategyOptions]  # what can be asked of it: what its class is made of
    splits_batch: bool = True


STRATEGIES = {
    "pipeline": StrategyEntry(
        "pipeline.strategy:Pipeline", options.PipelineOptions, splits_batch=False
    ),
    "tensor": StrategyEntry(
        "tensor.strategy:TensorParallel", options.TensorOptions, splits_batch=False
    ),
    "recompute": StrategyEntry(
        "transforms.activation_checkpointing:Recompute",
        options.RecomputeOptions,
        splits_batch=False,
    ),
    "single": StrategyEntry("single:Single", options.NoOptions),
    "ddp": StrategyEntry("ddp.strategy:Ddp", options.DdpOptions),
    "zero1": StrategyEntry("zero.strategy:Zero1", options.ZeroOptions),
    "zero2": StrategyEntry("zero.strategy:Zero2", options.ZeroOptions),
    "zero3": StrategyEntry("zero.strategy:Zero3", options.ZeroOptions),
    "server": StrategyEntry("server.strategy:Server", options.ServerOptions),
    "local": StrategyEntry("local_sgd:LocalSgd", options.LocalOptions),
    "diloco": StrategyEntry("local_sgd:Diloco", options.DilocoOptions),
}
"""By name, in the order in which they cut."""
DATA = [name for name, strategy in STRATEGIES.items() if strategy.splits_batch]
"""What shares out the batch: one of them in a line; ddp where none is named."""


SYNCHRONOUS = (
    "train.record: with staleness=0 every run of the same job gives the same bits; to look at one "
    "again, run it again. "
    "What can be recorded is --strategy server=N,staleness=async, or another number than 0."
)


NO_SERVERS = (
    "train.record: there are no parameter servers whose order of pushes could be recorded. Without "
    "them every run of "
    "the same job takes the same steps; to look at one again, run it again"
)


@dataclass(frozen=True)
class StrategySpec:
    """One strategy of a line: `name=value` and the options that follow it.

    Attributes:
        value, words: as text.
        options: the same as an object, with defaults. None for a strategy of one's own, whose
            class may need torch.
    """

    name: str
    value: str | None
    words: tuple[tuple[str, str], ...]
    options: options.StrategyOptions | None = None

    def __str__(self) -> str:
        first = self.name if self.value is None else f"{self.name}={self.value}"
        return ",".join([first, *(f"{name}={text}" for name, text in self.words)])


@dataclass(frozen=True)
class StrategyLine:
    """A line that was read: its text, and its strategies in the order in which they apply."""

    text: str
    specs: tuple[StrategySpec, ...]

    def __str__(self) -> str:
        return self.text


def parse_line(text: str) -> StrategyLine:
    """Read a line of strategies. Needs no torch.

    Raises: ConfigError: with every wrong name; with every option that makes no sense whatever the
        model and the world.
    """
    specs = _parse_specs(text)
    problems: list[str] = []
    checked = tuple(_with_options(spec, problems) for spec in specs)
    _raise(text, problems)
    return StrategyLine(text, checked)


def _parse_specs(text: str) -> list[StrategySpec]:
    """Split a line into its strategies, in the order in which they apply.

    Raises: ConfigError: with every wrong name.
    """
    found: list[StrategySpec] = []
    problems = []
    for word in (word.strip() for word in text.split(",")):
        name, equals, value = word.partition("=")
        if name in STRATEGIES or ":" in name:
            found.append(StrategySpec(name, value if equals else None, ()))
        elif found and equals:
            last = found.pop()
            found.append(StrategySpec(last.name, last.value, (*last.words, (name, value))))
        else:
            problems.append(f"'{name}' is not known; {did_you_mean(name, STRATEGIES)}")
    names = [spec.name for spec in found]
    problems += [f"{name} stands there twice" for name in STRATEGIES if names.count(name) > 1]
    sharing = [name for name in names if _shares_batch(name)]
    if len(set(sharing)) > 1:
        problems.append(f"{' and '.join(sharing)} share out the batch in different ways; keep one")
    _raise(text, problems)
    if not sharing:
        found.append(StrategySpec("ddp", None, ()))
    return _in_order(found)


def _shares_batch(name: str) -> bool:
    return name in DATA or name not in STRATEGIES


def _in_order(specs: Iterable[StrategySpec]) -> list[StrategySpec]:
    """Sort strategies in the order in which they apply; one's own last, as it shares out the
    batch.
    """
    places = {name: place for place, name in enumerate(STRATEGIES)}
    return sorted(specs, key=lambda spec: places.get(spec.name, len(places)))


def _with_options(spec: StrategySpec, problems: list[str]) -> StrategySpec:
    if spec.name not in STRATEGIES:
        return spec
    made = _made(spec, STRATEGIES[spec.name].options, problems)
    return StrategySpec(spec.name, spec.value, spec.words, made)


def add_allreduce_option(line: StrategyLine, algorithm: str) -> StrategyLine:
    """Give ddp the option `allreduce=algorithm`, as the flag --allreduce does. Raises
    ConfigError.
    """
    specs: list[StrategySpec] = []
    problems: list[str] = []
    for spec in line.specs:
        if spec.name in DATA and spec.name != "ddp":
            problem = f"only ddp has algorithms to choose from; the strategy is '{line}'. Leave one of both out"
            raise ConfigError([f"flag --allreduce: {problem}"])
        if spec.name == "ddp":
            words = dict(spec.words) | {"allreduce": algorithm}
            spec = _with_options(
                StrategySpec(spec.name, spec.value, tuple(words.items())), problems
            )
        specs.append(spec)
    text = ",".join(str(spec) for spec in specs)
    _raise(text, problems)
    return StrategyLine(text, tuple(specs))


def build_strategies(line: StrategyLine) -> list[Strategy]:
    """Make the strategies of a line. Needs torch.

    Raises: ConfigError: with every problem of one's own strategies.
    """
    problems: list[str] = []
    built = [_built(spec, problems) for spec in line.specs]
    _raise(line.text, problems)
    return built


def _raise(text: str, problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError([f"strategy '{text}': {problem}" for problem in problems])


def check_recordable(line: StrategyLine) -> None:
    """Raise ConfigError where runs of these strategies are the same every time.

    A strategy of one's own is asked later.
    """
    servers = [
        spec.options for spec in line.specs if isinstance(spec.options, options.ServerOptions)
    ]
    if any(server.staleness.strip("0") == "" for server in servers):
        raise ConfigError([SYNCHRONOUS])
    if not servers and all(spec.name in STRATEGIES for spec in line.specs):
        raise ConfigError([f"{NO_SERVERS}; the strategy is {line}."])


def _built(spec: StrategySpec, problems: list[str]) -> Any:
    """Make one strategy. Adds to `problems` where one's own cannot be made, and gives None."""
    if spec.options is not None:
        file, _, name = STRATEGIES[spec.name].where.partition(":")
        return _class_in(f"shoal.strategies.{file}", name)(**vars(spec.options))
    kind = _own_class(spec.name, problems)
    return None if kind is None else _made(spec, kind, problems)


def _own_class(name: str, problems: list[str]) -> type[Strategy] | None:
    """Import the class that MODULE:CLASS stands for.

    Adds to `problems` where it cannot be found or is no strategy, and gives None.
    """
    path, _, kind = name.partition(":")
    try:
        found = _class_in(path, kind)
    except (ImportError, AttributeError) as error:
        problems.append(
            f"{error}; a strategy of one's own is MODULE:CLASS, with the module on the Python path"
        )
        return None
    from shoal.strategies.base import Strategy

    if not (isinstance(found, type) and issubclass(found, Strategy)):
        problems.append(
            f"{name} is no strategy; derive the class from shoal.strategies.base.Strategy"
        )
        return None
    if found.__abstractmethods__:
        lacking = ", ".join(sorted(found.__abstractmethods__))
        problems.append(f"{name} lacks {lacking}; see shoal.strategies.base.Strategy")
        return None
    return found


def _class_in(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _made(spec: StrategySpec, kind: type[options.StrategyOptions], problems: list[str]) -> Any:
    """Make an object of `kind` with the options of `spec`.

    Adds to `problems` where one of them is wrong, and gives None.
    """
    before = len(problems)
    known = _types(kind)
    given = list(spec.words)
    if spec.value is not None and kind.value:
        given.insert(0, (kind.value, spec.value))
    elif spec.value is not None:
        problems.append(f"{spec.name} takes no value; it is '{spec.value}'")
    values = {}
    for key, text in given:
        if key not in known:
            hint = did_you_mean(key, known) if known else f"{spec.name} has no options"
            problems.append(f"option '{key}' is not known; {hint}")
            continue
        values[key] = _value(text, known[key])
        if type(values[key]) is not known[key]:
            problems.append(f"{key} must be of type {known[key].__name__}; it is '{text}'")
    if len(problems) > before:
        return None
    try:
        return kind(**values)
    except ConfigError as error:
        problems += error.problems
        return None


def _types(kind: type) -> dict[str, type]:
    """Map the name of each option to its type, which is that of its default."""
    return {field.name: type(field.default) for field in fields(kind)} if is_dataclass(kind) else {}


def _value(text: str, kind: type) -> Any:
    if kind is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return float(value) if kind is float and type(value) is int else value
