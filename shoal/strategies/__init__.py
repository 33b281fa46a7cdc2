"""Strategies by name, and the one line that chooses them: `ddp`, `zero3,hybrid=2`, `recompute=2,zero3,offload=true`.

A new strategy is one file, one line in `STRATEGIES`, one row in the conformance table of the tests; its options are a
class in `options.py`. One that is not ours is named by its class, `my_module:MyStrategy`. This module imports no torch:
a wrong name, option or value is said before any process is started.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from shoal.errors import ConfigError, did_you_mean
from shoal.strategies import options

if TYPE_CHECKING:
    from shoal.strategies.base import Strategy


class Known(NamedTuple):
    """One of our strategies."""

    where: str  # file:Class
    options: type  # what can be asked of it: what its class is made of
    shares_batch: bool = True


STRATEGIES = {
    "pipeline": Known("pipeline:Pipeline", options.PipelineOptions, shares_batch=False),
    "tensor": Known("tensor:TensorParallel", options.TensorOptions, shares_batch=False),
    "recompute": Known("recompute:Recompute", options.RecomputeOptions, shares_batch=False),
    "single": Known("single:Single", options.NoOptions),
    "ddp": Known("ddp:Ddp", options.DdpOptions),
    "zero1": Known("zero:Zero1", options.ZeroOptions),
    "zero2": Known("zero:Zero2", options.ZeroOptions),
    "zero3": Known("zero:Zero3", options.ZeroOptions),
    "server": Known("server:Server", options.ServerOptions),
    "local": Known("local:Local", options.LocalOptions),
    "diloco": Known("local:Diloco", options.DilocoOptions),
}
"""By name, in the order in which they cut."""
DATA = [name for name, strategy in STRATEGIES.items() if strategy.shares_batch]
"""What shares out the batch: one of them in a line; ddp where none is named."""


SYNCHRONOUS = (
    "train.record: with staleness=0 every run of the same job gives the same bits; to look at one again, run it again. "
    "What can be recorded is --strategy server=N,staleness=async, or another number than 0."
)


NO_SERVERS = (
    "train.record: there are no parameter servers whose order of pushes could be recorded. Without them every run of "
    "the same job takes the same steps; to look at one again, run it again"
)


class Named(NamedTuple):
    """One strategy of a line: `name=value` and the options that follow it, as text."""

    name: str
    value: str | None
    options: list[tuple[str, str]]


def named(line: str) -> list[Named]:
    """The strategies of a line, in the order in which they cut. Raises ConfigError with every wrong name."""
    found: list[Named] = []
    problems = []
    for word in (word.strip() for word in line.split(",")):
        name, equals, text = word.partition("=")
        if name in STRATEGIES or ":" in name:
            found.append(Named(name, text if equals else None, []))
        elif found and equals:
            found[-1].options.append((name, text))
        else:
            problems.append(f"strategy '{line}': '{name}' is not known; {did_you_mean(name, STRATEGIES)}")
    names = [strategy.name for strategy in found]
    problems += [f"strategy '{line}': {name} stands there twice" for name in STRATEGIES if names.count(name) > 1]
    data = [name for name in names if name in DATA or ":" in name]
    if len(set(data)) > 1:
        problems.append(f"strategy '{line}': {' and '.join(data)} share out the batch in different ways; keep one")
    if problems:
        raise ConfigError(problems)
    found += [] if data else [Named("ddp", None, [])]
    order = list(STRATEGIES)
    return sorted(found, key=lambda strategy: order.index(strategy.name) if strategy.name in order else len(order))


def with_allreduce(line: str, algorithm: str) -> str:
    """The line with `allreduce=algorithm` for its ddp: what the flag --allreduce stands for. Raises ConfigError."""
    found = named(line)
    words = []
    for strategy in found:
        if strategy.name in DATA and strategy.name != "ddp":
            problem = f"only ddp has algorithms to choose from; the strategy is '{line}'. Leave one of both out"
            raise ConfigError([f"flag --allreduce: {problem}"])
        options = dict(strategy.options)
        if strategy.name == "ddp":
            options["allreduce"] = algorithm
        value = "" if strategy.value is None else f"={strategy.value}"
        words += [f"{strategy.name}{value}", *(f"{name}={text}" for name, text in options.items())]
    return ",".join(words)


def parse(line: str) -> list[Strategy]:
    """The strategies that `line` names. Raises ConfigError with every problem of the line."""
    problems: list[str] = []
    found = [(strategy, _kind(strategy.name, problems)) for strategy in named(line)]
    made = [_made(strategy, kind, problems) for strategy, kind in found if kind is not None]
    _raise(line, problems)
    return made


def refuse_bad(line: str) -> None:
    """Raise ConfigError with every problem of the line that can be told without torch, a model and a world.

    Options of a strategy of one's own are asked for where it is made: its module may need torch.
    """
    problems: list[str] = []
    for strategy in named(line):
        if strategy.name in STRATEGIES:
            _made(strategy, STRATEGIES[strategy.name].options, problems)
    _raise(line, problems)


def _raise(line: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError([f"strategy '{line}': {problem}" for problem in problems])


def refuse_to_record(line: str) -> None:
    """Raises ConfigError where runs of these strategies are the same every time; one's own strategy is asked later."""
    chosen = {strategy.name: dict(strategy.options) for strategy in named(line)}
    if "server" in chosen and chosen["server"].get("staleness", "0").strip("0") == "":
        raise ConfigError([SYNCHRONOUS])
    if "server" not in chosen and not any(":" in name for name in chosen):
        raise ConfigError([f"{NO_SERVERS}; the strategy is {line}."])


def _kind(name: str, problems: list[str]) -> type | None:
    own = name not in STRATEGIES
    path, _, kind = name.partition(":") if own else STRATEGIES[name].where.partition(":")
    try:
        found: type = getattr(import_module(path if own else f"shoal.strategies.{path}"), kind)
        return found
    except (ImportError, AttributeError) as error:
        if not own:
            raise
        problems.append(f"{error}; a strategy of one's own is MODULE:CLASS, with the module on the Python path")
        return None


def _made(strategy: Named, kind: Any, problems: list[str]) -> Any:
    before = len(problems)
    known = {field.name: type(field.default) for field in fields(kind)}
    given = list(strategy.options)
    if strategy.value is not None:
        if not kind.value:
            problems.append(f"{strategy.name} takes no value; it is '{strategy.value}'")
        else:
            given.insert(0, (kind.value, strategy.value))
    values = {}
    for key, text in given:
        if key not in known:
            hint = did_you_mean(key, known) if known else f"{strategy.name} has no options"
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


def _value(text: str, kind: type) -> Any:
    if kind is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return float(value) if kind is float and type(value) is int else value
