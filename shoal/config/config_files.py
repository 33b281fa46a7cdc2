"""Configuration files: those of Shoal, those of a user, and the files from which they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.layers import Layer, SourcedValue, file_layer
from shoal.config.setting_fields import is_path
from shoal.config.yaml_subset import LocatedValue, parse_file
from shoal.errors import ConfigError, did_you_mean
from shoal.platform.ownership import read_text_of_file, untrusted_reason

BUILTIN = Path(__file__).parent / "builtin"
MAX_BYTES = 1 << 16  # of a configuration file; one with every setting has 5 KiB


@dataclass(frozen=True)
class File:
    """A configuration file, and its name in messages."""

    path: Path
    name: str


def builtin_names() -> Sequence[str]:
    """Return the names of the configurations that Shoal brings, sorted."""
    return sorted(path.stem for path in BUILTIN.glob("*.yaml"))


def load(file: File) -> dict[str, LocatedValue]:
    """Return the mapping in a file.

    Raises:
        ConfigError: the file cannot be read, its text is no YAML, or it has no settings.
    """
    try:
        mapping = parse_file(read_text_of_file(file.path, MAX_BYTES), file.name)
    except IsADirectoryError:
        cure = f"a run's configuration is {file.name}/config.yaml"
        raise ConfigError([f"{file.name}: is a directory; {cure}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file.name}: cannot be read: {error}"]) from None
    if not mapping:
        raise ConfigError([f"{file.name}: is empty; write at least one setting, such as `seed: 0`"])
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
    name = SourcedValue(LocatedValue(file.path.stem, text=file.path.stem), file.name)
    layers: list[Layer] = []
    chain: list[File] = []
    while True:
        mapping = load(file)
        base = mapping.pop("base", None)
        layer = file_layer(mapping, file.name, problems)
        problems += _foreign_code(file, layer)
        layers.insert(0, layer)
        chain.append(file)
        if base is None:
            break
        origin = f"{file.name}:{base.line}: base"
        file = find(base.text, file.path.parent, origin)
        if file.path.resolve() in (earlier.path.resolve() for earlier in chain):
            circle = " -> ".join(member.name for member in [*chain, file])
            raise ConfigError(
                [f"{origin}: {circle} goes round in a circle; let one of them stand alone"]
            )
    layers[-1].setdefault("name", name)
    return layers


def find(source: str | Path, directory: Path, origin: str) -> File:
    """Return the file of a built-in name or of a path. A built-in name has precedence.

    Args:
        source: a built-in name or a path.
        directory: where a relative path begins.
        origin: the argument or line that names the source, for the error.

    Raises:
        ConfigError: there is neither.
    """
    if isinstance(source, str) and source in builtin_names():
        return File(BUILTIN / f"{source}.yaml", f"builtin/{source}.yaml")
    path = directory / source
    if not is_path(str(source)) or not path.exists():
        hint = did_you_mean(str(source), builtin_names()).replace("known:", "built in are:")
        raise ConfigError(
            [f"{origin}: '{source}' is neither a file nor a built-in configuration; {hint}"]
        )
    return File(path, str(path))


def _names_class(line: str) -> bool:
    """Return True if a strategy line has a class of a user's module, `module:Class`."""
    return any(":" in word.partition("=")[0] for word in line.split(","))


def _foreign_code(file: File, layer: Layer) -> list[str]:
    """Return a line for each setting that names Python code, if another user could have set it."""
    named = [
        value
        for name, value in layer.items()
        if (name == "imports" and value.located.value)
        or (name == "strategy" and _names_class(value.located.text))
    ]
    reason = untrusted_reason(file.path.resolve(), allow_private_group=True) if named else None
    return [f"{value.origin}: it names code to run, and {reason}" for value in named if reason]
