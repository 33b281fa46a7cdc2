"""Names of models in torchvision and timm, read from their files: to import them takes seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

REGISTERED = re.compile(r"^@register_model\b[^\n]*\n(?:(?!def )[^\n]*\n){0,15}?def (\w+)\(", re.M)
LIBRARIES = ("torchvision", "timm")


def is_mentioned(name: str) -> bool:
    """Return True if a file of a library's models defines `name`, or has it as a string.

    So a name that is registered in another way than usual is never taken for an unknown one. True
    also where a library is absent, as on a login node, or a file cannot be read.
    """
    if not all(map(_files, LIBRARIES)):
        return True
    forms = (f"\ndef {name}(", f'"{name}"', f"'{name}'")
    return any(text is None or any(form in text for form in forms) for text in _texts())


def registered_names() -> set[str]:
    """Return the names of all models of the libraries that are installed."""
    return {found for text in _texts() if text for found in REGISTERED.findall(text)}


def names_like(name: str) -> list[str]:
    """Return the registered names that are nearest to `name`, at most three."""
    return get_close_matches(name, sorted(registered_names()))


def _texts() -> Iterator[str | None]:
    """Yield the files of all models; None for one that cannot be read."""
    for library in LIBRARIES:
        yield from map(_text, _files(library))


def _files(library: str) -> list[Path]:
    spec = find_spec(library)
    places = spec.submodule_search_locations if spec is not None else None
    return sorted(Path(places[0], "models").glob("*.py")) if places else []


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
