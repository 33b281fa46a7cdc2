"""distribuuuu's command lines, understood: its YAML files and its KEY VALUE pairs, which
override the files.
"""

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

# What distribuuuu's code says and its configuration does not.
FIXED = {
    "data.shape": (3, 224, 224),
    "data.samples": 1000,
    "train.drop_last": True,
    "optimizer.name": "SGD",
}
SCHEDULE_NOTE = "distribuuuu sets the learning rate once an epoch; here every step has its own, on the same curve"


def translate(
    cfg: str | Path | None, pairs: Sequence[str], ranks: int, flags: Sequence[tuple[str, str]] = ()
) -> tuple[Settings, list[str]]:
    """The settings that stand for a command line of distribuuuu's, and notes on what is not plainly
    the same here.

    Args:
        cfg: its YAML file; None for its defaults.
        pairs: KEY, VALUE, KEY, VALUE ...
        ranks: how many processes will train; distribuuuu's batch size is that of one.
        flags: Shoal's own, as `read` takes them; they come on top.

    Raises: ConfigError: unknown keys and values that do not fit, all at once.
    """
    problems: list[str] = []
    given = ({} if cfg is None else _from_file(cfg, problems)) | _from_pairs(pairs, problems)
    values = _typed(given, problems)
    layer = _translated(values, given, ranks)
    layer["name"] = SourcedValue(
        _placed("distribuuuu" if cfg is None else Path(cfg).stem), str(cfg or "distribuuuu")
    )
    settings = resolve([layer, flag_layer(flags, problems)], problems)
    return settings, [*_notes(values, given, ranks), SCHEDULE_NOTE]


def _from_file(cfg: str | Path, problems: list[str]) -> Layer:
    """What the file gives, under distribuuuu's names."""
    file = find(Path(cfg), Path(), "--cfg")
    given: Layer = {}
    for key, placed in load(file).items():
        is_section = isinstance(placed.value, dict)
        inner = (
            {f"{key}.{name}": item for name, item in placed.value.items()}
            if is_section
            else {key: placed}
        )
        for name, item in inner.items():
            _put(given, name, SourcedValue(item, f"{file.where}:{item.line}"), problems)
    return given


def _from_pairs(pairs: Sequence[str], problems: list[str]) -> Layer:
    given: Layer = {}
    for key, text in zip(pairs[::2], pairs[1::2], strict=False):
        if text.startswith("(") and text.endswith(")"):
            text = f"[{text[1:-1]}]"  # Python's tuples, which it takes too
        origin = f"argument {key}"
        try:
            _put(given, key, SourcedValue(parse_flag(text, origin), origin), problems)
        except ConfigError as error:
            problems.extend(error.problems)
    if len(pairs) % 2:
        problems.append(
            f"argument {pairs[-1]}: has no value; distribuuuu's arguments are pairs, KEY VALUE"
        )
    return given


def _put(layer: Layer, key: str, given: SourcedValue, problems: list[str]) -> None:
    if key in KEYS:
        layer[key] = given
    else:
        problems.append(
            f"{given.origin}: {key} is not a key of distribuuuu's; {did_you_mean(key, KEYS)}"
        )


def _typed(given: Layer, problems: list[str]) -> dict[str, Any]:
    """A value for each key, the default where none was given, or none that fits."""
    values = {key: row.default for key, row in KEYS.items()}
    for key, item in given.items():
        try:
            values[key] = typed(item.placed, KEYS[key].kind)
        except ValueError as error:
            problems.append(f"{item.origin}: {key} {error}")
    if values["MODEL.PRETRAINED"]:
        problems.append(
            f"{given['MODEL.PRETRAINED'].origin}: MODEL.PRETRAINED True "
            f"{KEYS['MODEL.PRETRAINED'].note}"
        )
    if values["RNG_SEED"]:
        values["CUDNN.DETERMINISTIC"] = True
    if values["CUDNN.DETERMINISTIC"]:
        values["CUDNN.BENCHMARK"] = False
    return values


def _translated(values: Mapping[str, Any], given: Layer, ranks: int) -> Layer:
    layer = {name: SourcedValue(_placed(value), "distribuuuu") for name, value in FIXED.items()}
    for key, row in KEYS.items():
        if row.setting:
            origin = given[key].origin if key in given else "distribuuuu's default"
            layer[row.setting] = SourcedValue(_placed(row.convert(values[key], ranks)), origin)
    return layer


def _notes(values: Mapping[str, Any], given: Layer, ranks: int) -> Iterator[str]:
    for key, row in KEYS.items():
        value, ours = values[key], row.convert(values[key], ranks)
        due = {
            "given": key in given,
            "unusual": value != row.default,
            "changed": value != ours,
            "never": False,
        }
        if due[row.note_when]:
            yield f"{key} {write(value)} {row.note.format(value=value, ours=write(ours), ranks=ranks)}"
    if values["RNG_SEED"]:
        yield f"RNG_SEED {values['RNG_SEED']} turns CUDNN.DETERMINISTIC on and CUDNN.BENCHMARK off, as there"


def _placed(value: Any) -> LocatedValue:
    items = [_placed(item) for item in value] if isinstance(value, tuple) else value
    return LocatedValue(items, text="" if value is None else str(value))
