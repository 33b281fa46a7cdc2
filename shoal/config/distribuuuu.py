"""Translation of distribuuuu's command lines: a YAML file, and KEY VALUE pairs on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config.config_files import find, load
from shoal.config.convert import typed
from shoal.config.distribuuuu_keys import KEYS
from shoal.config.layers import Layer, SourcedValue, flag_layer
from shoal.config.read import Settings, resolve
from shoal.config.yaml_subset import LocatedValue, parse_flag, write
from shoal.errors import ConfigError, did_you_mean

# Settings that distribuuuu's code fixes: it has no key for them.
FIXED = {
    "data.shape": (3, 224, 224),
    "data.samples": 1000,
    "train.drop_last": True,
    "optimizer.name": "SGD",
}
SCHEDULE_NOTE = (
    "distribuuuu sets the learning rate once an epoch; here every step has its own, on the same "
    "curve"
)


def translate(
    cfg: str | Path | None, pairs: Sequence[str], ranks: int, flags: Sequence[tuple[str, str]] = ()
) -> tuple[Settings, list[str]]:
    """Return the settings for a command line of distribuuuu, and notes on the differences.

    Args:
        cfg: its YAML file; None for its defaults.
        pairs: KEY, VALUE, KEY, VALUE ...
        ranks: the number of processes that will train. distribuuuu's batch size is that of one.
        flags: Shoal's flags, as for `read`; they come on top.

    Raises:
        ConfigError: all unknown keys, and all values that do not fit.
    """
    problems: list[str] = []
    given: Layer = {} if cfg is None else _from_file(cfg, problems)
    given |= _from_pairs(pairs, problems)
    values = _typed(given, problems)
    layer = _translated(values, given, ranks)
    name = "distribuuuu" if cfg is None else Path(cfg).stem
    layer["name"] = SourcedValue(_located(name), str(cfg or "distribuuuu"))
    settings = resolve([layer, flag_layer(flags, problems)], problems)
    return settings, [*_notes(values, given, ranks), SCHEDULE_NOTE]


def _from_file(cfg: str | Path, problems: list[str]) -> Layer:
    """Return the values in a file, by distribuuuu's keys."""
    file = find(Path(cfg), Path(), "--cfg")
    layer: Layer = {}
    for key, located in load(file).items():
        items = {key: located}
        if isinstance(located.value, dict):  # a section: `TRAIN:` with `BATCH_SIZE:` in it
            items = {f"{key}.{name}": item for name, item in located.value.items()}
        for name, item in items.items():
            _add(layer, name, SourcedValue(item, f"{file.name}:{item.line}"), problems)
    return layer


def _from_pairs(pairs: Sequence[str], problems: list[str]) -> Layer:
    """Return the values of KEY VALUE pairs, by distribuuuu's keys."""
    layer: Layer = {}
    for key, text in zip(pairs[::2], pairs[1::2], strict=False):
        if text.startswith("(") and text.endswith(")"):
            text = f"[{text[1:-1]}]"  # distribuuuu accepts Python's tuples too
        origin = f"argument {key}"
        try:
            _add(layer, key, SourcedValue(parse_flag(text, origin), origin), problems)
        except ConfigError as error:
            problems.extend(error.problems)
    if len(pairs) % 2:
        problems.append(
            f"argument {pairs[-1]}: has no value; distribuuuu's arguments are pairs, KEY VALUE"
        )
    return layer


def _add(layer: Layer, key: str, value: SourcedValue, problems: list[str]) -> None:
    if key in KEYS:
        layer[key] = value
    else:
        problems.append(
            f"{value.origin}: {key} is not a key of distribuuuu's; {did_you_mean(key, KEYS)}"
        )


def _typed(given: Layer, problems: list[str]) -> dict[str, Any]:
    """Return a value for each key; the default where there is none, or one that does not fit."""
    values = {key: row.default for key, row in KEYS.items()}
    for key, item in given.items():
        try:
            values[key] = typed(item.located, KEYS[key].kind)
        except ValueError as error:
            problems.append(f"{item.origin}: {key} {error}")
    if values["MODEL.PRETRAINED"]:
        problems.append(
            f"{given['MODEL.PRETRAINED'].origin}: MODEL.PRETRAINED True "
            f"{KEYS['MODEL.PRETRAINED'].note}"
        )
    # As in distribuuuu's setup of seeds.
    if values["RNG_SEED"]:
        values["CUDNN.DETERMINISTIC"] = True
    if values["CUDNN.DETERMINISTIC"]:
        values["CUDNN.BENCHMARK"] = False
    return values


def _translated(values: Mapping[str, Any], given: Layer, ranks: int) -> Layer:
    """Return the values by the names of our settings."""
    layer = {name: SourcedValue(_located(value), "distribuuuu") for name, value in FIXED.items()}
    for key, row in KEYS.items():
        if row.setting:
            origin = given[key].origin if key in given else "distribuuuu's default"
            layer[row.setting] = SourcedValue(_located(row.convert(values[key], ranks)), origin)
    return layer


def _notes(values: Mapping[str, Any], given: Layer, ranks: int) -> Iterator[str]:
    """Yield a note for each key whose meaning here differs from that in distribuuuu."""
    for key, row in KEYS.items():
        value = values[key]
        ours = row.convert(value, ranks)
        is_due = {
            "given": key in given,
            "unusual": value != row.default,
            "changed": value != ours,
            "never": False,
        }
        if is_due[row.note_when]:
            note = row.note.format(value=value, ours=write(ours), ranks=ranks)
            yield f"{key} {write(value)} {note}"
    if values["RNG_SEED"]:
        yield (
            f"RNG_SEED {values['RNG_SEED']} turns CUDNN.DETERMINISTIC on and CUDNN.BENCHMARK off, "
            "as there"
        )


def _located(value: Any) -> LocatedValue:
    """Return a value as if it had been parsed, without a line."""
    items = [_located(item) for item in value] if isinstance(value, tuple) else value
    return LocatedValue(items, text="" if value is None else str(value))
