"""Layers: the values of one file or of the flags, by dotted name, each with its origin.

Files are those of Shoal (built in), those of a user, and the files from which they start (`base:`).

A higher layer replaces the values of a lower one. An open setting (`model.options`) is merged key
by key. `none` empties it first. So does another `name` in the same section, because options belong
to the name for which they were written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.config.fields import all_sections, all_settings, open_setting
from shoal.config.job import is_path
from shoal.config.yaml_subset import LocatedValue, parse_file, parse_flag
from shoal.errors import ConfigError, did_you_mean
from shoal.platform.ownership import read_text_of_file, untrusted_reason

BUILTIN = Path(__file__).parent / "builtin"
MAX_BYTES = 1 << 16  # of a configuration file; one with every setting has 5 KiB

# The words of other programs for our settings.
FOREIGN_NAMES = {
    "imports": "plugins",
    "arch": "model.name",
    "architecture": "model.name",
    "pretrained": "model.weights",
    "syncbn": "model.sync_batchnorm",
    "dataset": "data.name",
    "root": "data.path",
    "num_workers": "data.workers",
    "img_size": "data.image_size",
    "bs": "train.batch_size",
    "max_epoch": "train.epochs",
    "num_epochs": "train.epochs",
    "gradient_accumulation_steps": "train.accumulate",
    "max_grad_norm": "train.clip_norm",
    "amp": "train.precision",
    "smoothing": "train.label_smoothing",
    "learning_rate": "optimizer.lr",
    "base_lr": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "betas": "optimizer.options.betas",
    "eps": "optimizer.options.eps",
    "min_lr": "schedule.final_factor",
    "scheduler": "schedule",
    "output_dir": "out",
    "random_seed": "seed",
    "width": "model.options.width",
    "dropout": "model.options.dropout",
}


Layer = dict[str, LocatedValue]


def shown(path: Path) -> str:
    """Return the name of a configuration file in messages."""
    return f"builtin/{path.name}" if path.parent == BUILTIN else str(path)


def builtin_names() -> Sequence[str]:
    """Return the names of the configurations that Shoal brings, sorted."""
    return sorted(path.stem for path in BUILTIN.glob("*.yaml"))


def load(file: Path) -> dict[str, LocatedValue]:
    """Return the mapping in a file.

    Raises:
        ConfigError: the file cannot be read, its text is no YAML, or it has no settings.
    """
    name = shown(file)
    try:
        mapping = parse_file(read_text_of_file(file, MAX_BYTES), name)
    except IsADirectoryError:
        cure = f"a run's configuration is {name}/config.yaml"
        raise ConfigError(f"{name}: is a directory; {cure}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    if not mapping:
        raise ConfigError(f"{name}: is empty; write at least one setting, such as `seed: 0`")
    return mapping


def file_layers(source: str | Path, problems: list[str]) -> list[Layer]:
    """Return the layers of a configuration and of its bases (`base:`), the lowest first.

    The name of a run is that of the requested file, unless that file sets another.

    Args:
        source: a built-in name or a path.
        problems: problems with settings are appended here.

    Raises:
        ConfigError: a file is missing, cannot be read or starts from itself.
    """
    file = find(source, Path(), str(source))
    name = LocatedValue(file.stem, shown(file), file.stem)
    layers: list[Layer] = []
    chain: list[Path] = []
    while True:
        mapping = load(file)
        base = mapping.pop("base", None)
        layer = flattened(mapping, problems)
        problems += _foreign_code(file, layer)
        layers.insert(0, layer)
        chain.append(file)
        if base is None:
            break
        origin = f"{base.origin}: base"
        file = find(base.text, file.parent, origin)
        if file.resolve() in (earlier.resolve() for earlier in chain):
            circle = " -> ".join(map(shown, [*chain, file]))
            raise ConfigError(
                f"{origin}: {circle} goes round in a circle; let one of them stand alone"
            )
    layers[-1].setdefault("name", name)
    return layers


def find(source: str | Path, directory: Path, origin: str) -> Path:
    """Return the file of a built-in name or of a path. A built-in name has precedence.

    Args:
        source: a built-in name or a path.
        directory: where a relative path begins.
        origin: the argument or line that names the source, for the error.

    Raises:
        ConfigError: there is neither.
    """
    if isinstance(source, str) and source in builtin_names():
        return BUILTIN / f"{source}.yaml"
    path = directory / source
    if not is_path(str(source)) or not path.exists():
        hint = did_you_mean(str(source), builtin_names()).replace("known:", "built in are:")
        raise ConfigError(
            f"{origin}: '{source}' is neither a file nor a built-in configuration; {hint}"
        )
    return path


def _foreign_code(file: Path, layer: Layer) -> list[str]:
    """Return a line for each setting that names Python code, if another user could have set it."""
    named = [
        value
        for name, value in layer.items()
        if (name == "plugins" and value.value)
        # A class of a user's module, `module:Class`.
        or (name == "strategy" and any(":" in w.partition("=")[0] for w in value.text.split(",")))
    ]
    reason = untrusted_reason(file.resolve(), allow_private_group=True) if named else None
    return [f"{value.origin}: it names code to run, and {reason}" for value in named if reason]


def flag_layer(flags: Iterable[tuple[str, str]], problems: list[str]) -> Layer:
    """Return the settings in pairs of dotted name and text. The last of repeated flags counts.

    Several pairs `("plugin", FILE)` together are the setting `plugins`.
    """
    layer: Layer = {}
    plugins: list[LocatedValue] = []
    for name, text in flags:
        origin = f"flag --{name}"
        if name == "plugin":
            plugins.append(LocatedValue(text, origin, text))
            layer["plugins"] = LocatedValue(plugins, origin)
            continue
        if not text.strip():
            problems.append(f"{origin}: the value is empty; `none` is the word for no value")
            continue
        try:
            located = parse_flag(text, origin)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        # A layer of its own: a repeated flag is no error, while a repeated name in a file is.
        layer |= flattened({name: located}, problems)
    return layer


def merged(layers: Sequence[Layer]) -> Layer:
    """Return one layer made of several, the lowest first.

    An open setting has one entry for each key, and none under its own name.
    """
    result: Layer = {}
    for layer in layers:
        for name in _emptied(layer, result):
            for key in [key for key in result if key.startswith(f"{name}.")]:
                del result[key]
        result |= {name: value for name, value in layer.items() if not _empties(name, value)}
    return result


def flattened(
    mapping: Mapping[str, LocatedValue],
    problems: list[str],
    layer: Layer | None = None,
    prefix: str = "",
) -> Layer:
    """Return the settings of a nested mapping by dotted name; append a problem for each unknown.

    Args:
        layer: is added to.
        prefix: of the names.
    """
    layer = {} if layer is None else layer
    for key, located in mapping.items():
        name = prefix + key
        is_mapping = isinstance(located.value, dict)
        setting = all_settings().get(name)
        if is_mapping and (name in all_sections() or (setting and setting.is_open)):
            flattened(located.value, problems, layer, f"{name}.")
        elif problem := _mismatch(name, located.value):
            problems.append(f"{located.origin}: {problem}")
        elif name in layer:
            problems.append(
                f"{located.origin}: {name} is set twice, at {layer[name].origin} too; remove one"
            )
        elif name not in all_sections():
            layer[name] = located
    return layer


def _mismatch(name: str, value: Any) -> str:
    """Return why this name cannot be set to this value; empty if it can."""
    if name in all_settings():
        return ""
    if name in all_sections():
        if value is None:  # a section that has only comments
            return ""
        prefix = f"{name}."
        inner = [other.removeprefix(prefix) for other in all_settings() if other.startswith(prefix)]
        return f"{name} is a section and takes no value; it holds {', '.join(inner)}"
    match = open_setting(name)
    if match is None:
        return unknown(name)
    setting, key = match
    if key.isidentifier():
        return ""
    return (
        f"'{key}' cannot be a keyword argument in {setting}; write what lies deeper as KEY: {{...}}"
    )


def _empties(name: str, value: LocatedValue) -> bool:
    """Return True for `none` in an open setting, which removes the keys of lower layers."""
    return name in all_settings() and all_settings()[name].is_open and value.value is None


def _emptied(layer: Layer, lower: Layer) -> list[str]:
    """Return the open settings of which `layer` removes the keys in lower layers."""
    names = [name for name, value in layer.items() if _empties(name, value)]
    for setting in all_settings().values():
        chooser = f"{setting.section}.name"  # `model.name` chooses whose `model.options` these are
        if setting.is_open and chooser in layer:
            previous = all_settings()[chooser].default
            if chooser in lower:
                previous = lower[chooser].text
            if layer[chooser].text != previous:
                names.append(setting.name)
    return names


def unknown(name: str) -> str:
    """Return `NAME is not known; did you mean 'X'?`, or the names in its section.

    X may also be a setting that resembles only the last word of the name.
    """
    section, _, last = name.rpartition(".")
    found = [other for other in all_settings() if other.startswith(f"{name}_")]
    if section in all_settings():  # `strategy.name`: a setting, and no section
        found = [section]
    if not found:
        spellings = _spellings()
        # A last word that fits is better evidence than a whole name that looks alike.
        close = get_close_matches(last, spellings, n=1, cutoff=0.8)
        if not close and section not in all_sections():
            close = get_close_matches(name, spellings, n=1, cutoff=0.6)
        found = spellings[close[0]] if close else []
        # Of several settings with this last word, one in the same section is the likeliest.
        found = [other for other in found if other.rpartition(".")[0] == section] or found
    if found:
        likely = " or ".join(f"'{other}'" for other in found[:3])
        return f"{name} is not known; did you mean {likely}?"
    where, known = "", [other for other in (*all_settings(), *all_sections()) if "." not in other]
    if section in all_sections():
        where, known = f" in {section}", [o for o in all_settings() if o.startswith(f"{section}.")]
    return f"{name} is not known; known{where}: {', '.join(known)}"


def _spellings() -> dict[str, list[str]]:
    """Return the names that a text may mean: a dotted name, a last word, a foreign word."""
    spellings: dict[str, list[str]] = defaultdict(list)
    for name in (*all_settings(), *all_sections()):
        for spelling in {name, name.rpartition(".")[2]}:
            spellings[spelling].append(name)
    for word, name in FOREIGN_NAMES.items():
        spellings[word] = spellings.get(word, [name])
    return spellings
