"""The forms in which torch lets a process group be called, brought to the one that methods take.

      group.allreduce([tensor], opts)      torch.distributed and torch's C++ call so
      group.allreduce(tensor)              \\
      group.allreduce(tensor, op)           } programs may call so, too
      group.allreduce(tensors=[tensor])    /
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])


def with_direct_forms(
    options: type, tensors: Mapping[str, int], also: Sequence[str] = ("timeout",)
) -> Callable[[Method], Method]:
    """Return a decorator for a method that takes lists of tensors and torch's options.

    Args:
        options: the class of the options.
        tensors: for each leading argument of the method the number of lists around its tensors.
        also: the arguments of the direct form that follow the tensors: op, root, timeout.
    """
    names = tuple(tensors)

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            if not named and len(args) == len(names) + 1 and type(args[-1]) is options:
                return method(self, *args)
            has_options = any(type(value) is options for value in (*args, *named.values()))
            order = (*names, "opts") if has_options else (*names, *also)
            if len(args) > len(order):
                raise TypeError(
                    f"{method.__name__.removeprefix('_')} takes {order}, not {len(args)} arguments"
                )
            values = dict(zip(order, args, strict=False))
            values |= {_canonical(name, names): value for name, value in named.items()}
            lists = [_in_lists(values.pop(name), depth) for name, depth in tensors.items()]
            opts = values.pop("opts", None) or make_options(options, values)
            return method(self, *lists, opts)

        return cast("Method", call)

    return decorate


def make_options(options: type, values: Mapping[str, Any]) -> Any:
    """Return torch's options with an operation `op`, a `root` and a `timeout`, where given."""
    opts, fields = options(), {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
    for name, value in values.items():
        if not hasattr(opts, fields.get(name, name)):
            raise TypeError(f"this collective takes no argument {name}")
        if value is not None:
            setattr(opts, fields[name], value)
    return opts


def _canonical(name: str, names: Sequence[str]) -> str:
    """Return the method's name for an argument, of which torch has several."""
    if name in names:
        return name
    # tensor for tensors; output_tensors, output_tensor, output for outputs
    stem = re.sub("(_tensor)?s?$", "", name)
    return next((known for known in names if known.startswith(stem)), name)


def _in_lists(value: Any, depth: int) -> Any:
    """Put a tensor, or a list of tensors, into as many lists as the method takes."""
    found, inner = 0, value
    while not isinstance(inner, Tensor):
        if not inner:
            return value  # an empty list, such as the outputs of a gather on other ranks
        found, inner = found + 1, inner[0]
    for _ in range(depth - found):
        value = [value]
    return value
