"""From a name on the command line to the files that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.layers import Layer, SourcedValue, file_layer
from shoal.config.yaml_subset import LocatedValue, parse_file
from shoal.errors import ConfigError, did_you_mean

BUILTIN = Path(__file__).parent / "builtin"


@dataclass(frozen=True)
class File:
    """A configuration file, and what to call it in messages."""

    path: Path
    where: str


def builtin_names() -> Sequence[str]:
    """The names that stand for files of Shoal's own, sorted."""
    return sorted(path.stem for path in BUILTIN.glob("*.yaml"))


def load(file: File) -> dict[str, LocatedValue]:
    """The file's mapping.

    Raises: ConfigError: a file that cannot be read, or not as YAML.
    """
    try:
        return parse_file(file.path.read_text(encoding="utf-8"), file.where)
    except IsADirectoryError:
        cure = f"a run's configuration is {file.where}/config.yaml"
        raise ConfigError([f"{file.where}: is a directory; {cure}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file.where}: cannot be read: {error}"]) from None


def file_layers(source: str | Path, problems: list[str]) -> list[Layer]:
    """The layers of a built-in name or a path and of all that it starts from (`base:`), the lowest
    first.

    A run is called after the file that was asked for, unless that file itself says otherwise.

    Raises: ConfigError: a file that is missing, cannot be read or starts from itself.
    """
    file = find(source, Path(), str(source))
    name = SourcedValue(LocatedValue(file.path.stem, text=file.path.stem), file.where)
    layers: list[Layer] = []
    chain: list[File] = []
    while True:
        mapping = load(file)
        base = mapping.pop("base", None)
        layers.insert(0, file_layer(mapping, file.where, problems))
        chain.append(file)
        if base is None:
            break
        origin = f"{file.where}:{base.line}: base"
        file = find(base.text, BUILTIN if file.path.parent == BUILTIN else file.path.parent, origin)
        if file.path.resolve() in (earlier.path.resolve() for earlier in chain):
            circle = " -> ".join(member.where for member in [*chain, file])
            raise ConfigError(
                [f"{origin}: {circle} goes round in a circle; let one of them stand alone"]
            )
    layers[-1].setdefault("name", name)
    return layers


def find(source: str | Path, directory: Path, origin: str) -> File:
    """The file of a built-in name, which comes first, or of a path, which may be relative to the
    directory.

    Raises: ConfigError: there is neither; said of `origin`.
    """
    if isinstance(source, str) and source in builtin_names():
        return File(BUILTIN / f"{source}.yaml", f"builtin/{source}.yaml")
    path = directory / source
    if not path.exists():
        hint = did_you_mean(str(source), builtin_names()).replace("known:", "built in are:")
        raise ConfigError(
            [f"{origin}: '{source}' is neither a file nor a built-in configuration; {hint}"]
        )
    return File(path, str(path))
