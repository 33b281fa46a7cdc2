"""Check a model's options against the signature of its builder, before the builder is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args, get_origin

from shoal.errors import did_you_mean, raise_problems
from shoal.platform.plain_types import LISTS, UNIONS, WORDS, describe

Parameters = Mapping[str, inspect.Parameter]


def refuse(*rules: tuple[bool, str]) -> None:
    """Raise one ConfigError with the texts of all broken rules, each with the prefix `model.`.

    Args: rules: (True if broken, text).
    """
    problems = [f"model.{text}" for broken, text in rules if broken]
    raise_problems(problems)


def no_image(model: str, input_shape: tuple[int, ...]) -> tuple[bool, str]:
    """Return the rule, for `refuse`, that samples must be images."""
    text = (
        f"name: {model} takes images (channels, height, width), "
        f"but a sample is {tuple(input_shape)}"
    )
    return len(input_shape) != 3, text


def no_sequence(model: str, input_shape: tuple[int, ...]) -> tuple[bool, str]:
    """Return the rule, for `refuse`, that samples must be sequences of tokens."""
    text = f"name: {model} takes sequences (time,), but a sample is {tuple(input_shape)}"
    return len(input_shape) != 1, text


def parameters_of(builder: Callable[..., Any]) -> Parameters:
    """Return the builder's keyword parameters by name, `**kwargs` included under its own name."""
    try:
        signature = inspect.signature(builder, eval_str=True)
    except NameError:
        # A type imported for type checkers only: then the names are checked, but not the types.
        signature = inspect.signature(builder)
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind not in by_position
    }


def problems_of(
    model: str, parameters: Parameters, options: Mapping[str, Any], given: Collection[str]
) -> list[str]:
    """Return the problems of the options, one line each.

    Args:
        model: name of the model, for the messages.
        parameters: of its builder.
        options: from the config.
        given: parameters that Shoal fills in itself.
    """
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {
        name: p
        for name, p in parameters.items()
        if p.kind is not p.VAR_KEYWORD and name not in given
    }
    problems = []
    for name, value in options.items():
        if name in given:
            problems.append(
                f"model.options.{name}: Shoal fills this in from the data; leave it out"
            )
        elif name in known and not accepts(value, known[name].annotation):
            problems.append(
                f"model.options.{name}: must be {describe(known[name].annotation)}, not {value!r}"
            )
        elif name not in known and not open_ended:
            hint = did_you_mean(name, known) if known else "it takes none"
            problems.append(f"model.options.{name}: {model} has no such option; {hint}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            problems.append(f"model.options.{name}: {model} needs this option")
    return problems


def accepts(value: Any, annotation: Any) -> bool:
    """Return True where a plain value has this type. An annotation that is not plain accepts all.

    An int is accepted for a float, a bool for neither of them, and a list for any sequence.
    """
    if get_origin(annotation) in UNIONS:
        return any(accepts(value, choice) for choice in get_args(annotation))
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if get_origin(annotation) in LISTS:
        return isinstance(value, list | tuple) and all(
            accepts(item, get_args(annotation)[0]) for item in value
        )
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is annotation or annotation not in WORDS


def is_plain(annotation: Any) -> bool:
    """Return True for types whose values can stand in a config: no functions, no classes."""
    if get_origin(annotation) in (*UNIONS, *LISTS):
        return all(is_plain(argument) for argument in get_args(annotation) if argument is not ...)
    return get_origin(annotation) is Literal or annotation in WORDS
