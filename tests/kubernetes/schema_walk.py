"""A walk of an object through an OpenAPI schema, which finds what a Kubernetes server refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
}


def problems(schema: dict[str, Any], value: object, path: str = "") -> Iterator[str]:
    """A line for each unknown or missing key, each wrong type, each value that is none of an
    enum's.
    """
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: {value!r} is neither a number nor a string"
        return
    kind = schema["type"]
    is_number_for_bool = kind == "integer" and isinstance(value, bool)
    if not isinstance(value, TYPES[kind]) or is_number_for_bool:
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, dict):
        yield from _of_object(schema, value, path)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from problems(schema["items"], item, f"{path}[{number}]")


def _of_object(schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}: {name} is missing"
    known = schema.get("properties", {})
    others = schema.get("additionalProperties")
    for name, part in value.items():
        if name in known:
            yield from problems(known[name], part, f"{path}.{name}")
        elif others is not None:
            yield from problems(others, part, f"{path}.{name}")
        elif known:  # the schema of `metadata` is the server's own, and empty here
            yield f"{path}: {name} is unknown"
