"""Strategies by name, and the text that chooses them: `ddp`, `zero3,hybrid=2`,
`recompute=2,zero3,offload=true`.

      text ── parse_line ──> StrategyLine ── build_strategies ──> list[Strategy]
              once in the    names and options                    in each rank, where
              launcher       that are checked                     torch is imported

This module imports no torch, so a wrong name, option or value is an error before any process is
started. A new strategy is one file, one entry of `STRATEGIES`, a class of options in
`options.py`, and one row in the conformance table of the tests. A strategy that is not part of
Shoal is named by its class, `my_module:MyStrategy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.config.yaml_subset import plain_value
from shoal.errors import ConfigError, did_you_mean
from shoal.platform.plain_types import describe
from shoal.strategies import foreign_words, options
from shoal.strategies.options import PipelineOptions, ServerOptions, TensorOptions

if TYPE_CHECKING:
    from shoal.strategies.base import Strategy


class StrategyEntry(NamedTuple):
    """One strategy of Shoal."""

    class_path: str  # file:Class, below shoal.strategies
    options: type[options.StrategyOptions]  # the base class that declares the strategy's options
    splits_batch: bool = True


STRATEGIES = {
    "pipeline": StrategyEntry("pipeline.strategy:Pipeline", PipelineOptions, splits_batch=False),
    "tensor": StrategyEntry("tensor.strategy:TensorParallel", TensorOptions, splits_batch=False),
    "recompute": StrategyEntry(
        "transforms.activation_checkpointing:Recompute",
        options.RecomputeOptions,
        splits_batch=False,
    ),
    "single": StrategyEntry("single:Single", options.NoOptions),
    "dataparallel": StrategyEntry("data_parallel:DataParallelReplicas", options.NoOptions),
    "ddp": StrategyEntry("ddp.strategy:Ddp", options.DdpOptions),
    "zero1": StrategyEntry("zero.strategy:Zero1", options.ZeroOptions),
    "zero2": StrategyEntry("zero.strategy:Zero2", options.ZeroOptions),
    "zero3": StrategyEntry("zero.strategy:Zero3", options.ZeroOptions),
    "server": StrategyEntry("server.strategy:Server", ServerOptions),
    "local": StrategyEntry("local_sgd:LocalSgd", options.LocalOptions),
    "diloco": StrategyEntry("local_sgd:Diloco", options.DilocoOptions),
}
"""Strategies by name, in the order in which they apply."""
DATA = [name for name, entry in STRATEGIES.items() if entry.splits_batch]
"""Names of the strategies that split the global batch over ranks.

A run has exactly one of them: ddp if the text names none.
"""


OWN_CLASS = "a strategy of one's own is MODULE:CLASS, with the module on the Python path"
SYNCHRONOUS = (
    "train.record: with staleness=0 every run of the same job gives the same bits; to look at one "
    "again, run it again. "
    "What can be recorded is --strategy server=N,staleness=async, or another number than 0."
)


NO_SERVERS = (
    "train.record: there are no parameter servers whose order of pushes could be recorded. Without "
    "them every run of the same job takes the same steps; to look at one again, run it again"
)


@dataclass(frozen=True)
class StrategySpec:
    """One strategy of a text: `name=value`, and the options that follow it.

    Attributes:
        value: text after the name's equals sign; None without one.
        words: names and texts of the other options.
        options: value and words as an object, with defaults. None for a strategy that is not part
            of Shoal, whose class may need torch.
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
    """A strategy text and its strategies, in the order in which they apply."""

    text: str
    specs: tuple[StrategySpec, ...]

    def __str__(self) -> str:
        return self.text


def parse_line(text: str) -> StrategyLine:
    """Parse a strategy text. Needs no torch.

    Raises: ConfigError: with all unknown names; or with all options that no model and no world
        could use.
    """
    specs = _parse_specs(text)
    problems: list[str] = []
    checked = [
        replace(spec, options=_instantiate(spec, STRATEGIES[spec.name].options, problems))
        if spec.name in STRATEGIES
        else spec
        for spec in specs
    ]
    _raise_problems(text, problems)
    return StrategyLine(text, tuple(checked))


def _parse_specs(text: str) -> list[StrategySpec]:
    """Split a text into strategies, in the order in which they apply.

    Raises: ConfigError: with all unknown names.
    """
    specs: list[StrategySpec] = []
    problems = []
    for word in (word.strip() for word in text.split(",")):
        name, value = _name_and_value(word)
        module, colon, member = name.partition(":")
        if colon and not all(map(str.isidentifier, (*module.split("."), member))):
            problems.append(f"there is no '{name}'; {OWN_CLASS}")
        elif name in STRATEGIES or colon:
            specs.append(StrategySpec(name, value, ()))
        elif name == "auto":
            problems.append(
                "auto stands alone: the planner chooses the whole line, for shoal.init, "
                "`shoal train -n` and `shoal launch -n`; elsewhere give the line that `shoal plan` "
                "ends with"
            )
        elif instead := foreign_words.instead_of(name):
            problems.append(f"'{name}' is no strategy: {instead}")
        elif specs and value is not None:  # an option of the strategy before it
            specs[-1] = replace(specs[-1], words=(*specs[-1].words, (name, value)))
        elif owners := _owners(name):
            problems.append(f"'{name}' is an option, with a value: {owners[0]},{name}=...")
        else:
            problems.append(f"'{name}' is not known; {did_you_mean(name, STRATEGIES)}")
    names = [spec.name for spec in specs]
    _raise_problems(text, [*problems, *_clashes(names)])
    if not any(map(_splits_batch, names)):
        specs.append(StrategySpec("ddp", None, ()))
    # A strategy that is not part of Shoal comes last, because it splits the batch.
    positions = {name: position for position, name in enumerate(STRATEGIES)}
    return sorted(specs, key=lambda spec: positions.get(spec.name, len(positions)))


def _name_and_value(word: str) -> tuple[str, str | None]:
    name, equals, value = word.partition("=")
    return foreign_words.read_word(name, value if equals else None)


def text_of(strategies: Mapping[str, Any]) -> str:
    """Return strategies and their options, such as {"tensor": 2, "zero": 1}, as a text.

    True is a strategy without a value, or an option; None, and False for a strategy, leave it out.
    """
    words = []
    for name, value in strategies.items():
        is_strategy = _name_and_value(f"{name}={value}")[0] in STRATEGIES
        if value is None or (is_strategy and value is False):
            continue
        text = str(value).lower() if isinstance(value, bool) else value
        words.append(f"{name}" if is_strategy and value is True else f"{name}={text}")
    return ",".join(words)


def _clashes(names: Sequence[str]) -> Iterator[str]:
    """Yield why these strategies cannot stand together."""
    for name in STRATEGIES:
        if names.count(name) > 1:
            yield f"{name} stands there twice"
    splitting = [name for name in names if _splits_batch(name)]
    if len(set(splitting)) > 1:
        clash = " and ".join(splitting)
        yield f"{clash}: each divides the batch among the ranks in its own way; keep one"


def _splits_batch(name: str) -> bool:
    """Return True for `DATA`, and for every strategy that is not part of Shoal."""
    return name in DATA or name not in STRATEGIES


def build_strategies(line: StrategyLine) -> list[Strategy]:
    """Make the strategies of a line. Needs torch.

    Raises: ConfigError: with all problems of strategies that are not part of Shoal.
    """
    problems: list[str] = []
    strategies = [_build(spec, problems) for spec in line.specs]
    _raise_problems(line.text, problems)
    return strategies


def _raise_problems(text: str, problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(*[f"strategy '{text}': {problem}" for problem in problems])


def check_recordable(line: StrategyLine) -> None:
    """Raise ConfigError if runs of these strategies are equal every time.

    A strategy that is not part of Shoal is checked later, in the rank.
    """
    servers = [spec.options for spec in line.specs if isinstance(spec.options, ServerOptions)]
    if any(server.staleness.strip("0") == "" for server in servers):
        raise ConfigError(SYNCHRONOUS)
    if not servers and all(spec.name in STRATEGIES for spec in line.specs):
        raise ConfigError(f"{NO_SERVERS}; the strategy is {line}.")


def _build(spec: StrategySpec, problems: list[str]) -> Any:
    """Make one strategy.

    Return None, and add to `problems`, if a strategy that is not part of Shoal cannot be made.
    """
    if spec.options is not None:
        file, _, name = STRATEGIES[spec.name].class_path.partition(":")
        return getattr(import_module(f"shoal.strategies.{file}"), name)(**vars(spec.options))
    strategy_class = _import_strategy(spec.name, problems)
    return None if strategy_class is None else _instantiate(spec, strategy_class, problems)


def _import_strategy(class_path: str, problems: list[str]) -> type[Strategy] | None:
    """Import the class MODULE:CLASS.

    Return None, and add to `problems`, if there is no such class or it is no strategy.
    """
    module, _, name = class_path.partition(":")
    try:
        member = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        problems.append(f"{error}; {OWN_CLASS}")
        return None
    from shoal.strategies.base import Strategy

    if not (isinstance(member, type) and issubclass(member, Strategy)):
        problems.append(
            f"{class_path} is no strategy; derive the class from shoal.strategies.base.Strategy"
        )
        return None
    if member.__abstractmethods__:
        missing = ", ".join(sorted(member.__abstractmethods__))
        problems.append(f"{class_path} lacks {missing}; see shoal.strategies.base.Strategy")
        return None
    return member


def _instantiate(
    spec: StrategySpec, options_class: type[options.StrategyOptions], problems: list[str]
) -> Any:
    """Make an object of `options_class` with the options of `spec`.

    Return None, and add to `problems`, if an option is wrong.
    """
    num_problems = len(problems)
    types = _option_types(options_class)
    given = list(spec.words)
    if spec.value is not None and options_class.value:
        given.insert(0, (options_class.value, spec.value))
    elif spec.value is not None:
        ranks = "; the number of ranks is -n" if spec.value.isdecimal() else ""
        problems.append(f"{spec.name} takes no value; it is '{spec.value}'{ranks}")
    values = {}
    for key, text in given:
        if key not in types:
            hint = did_you_mean(key, types) if types else f"{spec.name} has no options"
            if owners := _owners(key):
                hint = f"it belongs to {', '.join(owners)}"
            problems.append(f"option '{key}' is not known; {hint}")
            continue
        values[key] = _parse_value(text, types[key])
        if type(values[key]) is int and abs(values[key]) >= 1 << 63:
            problems.append(f"{key} must be a whole number below 2^63; it is {text}")
        elif type(values[key]) is not types[key]:
            problems.append(f"{key} must be {describe(types[key])}; it is '{text}'")
    if len(problems) > num_problems:
        return None
    try:
        return options_class(**values)
    except ConfigError as error:
        problems += error.problems
        return None


def _owners(option: str) -> list[str]:
    """Return the strategies that have an option of this name."""
    return [name for name, e in STRATEGIES.items() if option in _option_types(e.options)]


def _option_types(options_class: type) -> dict[str, type]:
    """Map the name of each option to its type, which is that of its default."""
    if not is_dataclass(options_class):
        return {}
    return {field.name: type(field.default) for field in fields(options_class)}


def _parse_value(text: str, expected: type) -> Any:
    """Return an option's text in its type, as settings are read; of another type if it is not."""
    if expected is str:
        return text
    value = plain_value(text)
    if expected is int and type(value) is float and value.is_integer():
        return int(value)
    return float(value) if expected is float and type(value) is int else value
