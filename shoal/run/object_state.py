"""The state of a script's own objects, such as a scheduler or a moving average, in a checkpoint.

A checkpoint holds tensors by name, and JSON values. So `state_dict()` is taken apart:

    {"last_epoch": 3, "milestones": Counter({30: 1}), "average": tensor}

    tensors    "object.scheduler.average"
    JSON       {"mapping": [["last_epoch", 3], ["milestones", {"counter": [[30, 1]]}],
                            ["average", {"tensor": "object.scheduler.average"}]]}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.errors import UsageError

PREFIX = "object."
"""Begins the names of these tensors, which `Run.state` uses for none of its own."""
METHODS = ("state_dict", "load_state_dict")
_PLAIN = (bool, int, float, str)


def check_objects(objects: Mapping[str, Any]) -> None:
    """Raise UsageError for objects without `state_dict` and `load_state_dict`."""
    without = [
        f"{name} is a {type(value).__name__}"
        for name, value in objects.items()
        if not all(callable(getattr(value, call, None)) for call in METHODS)
    ]
    if without:
        raise UsageError(
            f"run.checkpoint: {', '.join(without)}, without state_dict() and load_state_dict(). "
            "Give it objects that have both, such as a scheduler or an AveragedModel."
        )


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON values, and put its tensors into `tensors`.

    Args: name: of the state, with which the names of its tensors begin.

    Raises: UsageError: it holds a shard, or anything but tensors, numbers, texts and containers.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        tensors[PREFIX + name] = value
        return {"tensor": PREFIX + name}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "mapping"
        items = value.items()
        return {kind: [[_key(k, name), take_apart(v, f"{name}.{k}", tensors)] for k, v in items]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [take_apart(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    what = "a shard of a tensor" if isinstance(value, DTensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"run.checkpoint: {name} of its state_dict() is {what}; a checkpoint holds tensors, "
        "numbers, texts, lists and dicts, without pickle."
    )


def put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `take_apart` was given."""
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        items = [put_together(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    pairs = {key: put_together(item, tensors) for key, item in content}
    return pairs if kind == "mapping" else Counter(pairs)


def _key(key: Any, name: str) -> Any:
    if key is None or isinstance(key, _PLAIN):
        return key
    raise UsageError(
        f"run.checkpoint: {name} of its state_dict() has the key {key!r}, a {type(key).__name__}; "
        "keys are texts or numbers."
    )
