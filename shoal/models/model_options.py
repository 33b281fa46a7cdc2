"""A model's options, checked against the signature of its builder before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from shoal.errors import ConfigError, did_you_mean

Parameters = Mapping[str, inspect.Parameter]
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "none",
}


def refuse(*rules: tuple[bool, str]) -> None:
    """Raise one ConfigError with the text of every rule that is broken, each behind `model.`;
    return if none is.
    """
    problems = [f"model.{text}" for broken, text in rules if broken]
    if problems:
        raise ConfigError(problems)


def no_image(model: str, input_shape: tuple[int, ...]) -> tuple[bool, str]:
    """The rule, for `refuse`, of a model that takes images."""
    text = (
        f"name: {model} takes images (channels, height, width), "
        f"but a sample is {tuple(input_shape)}"
    )
    return len(input_shape) != 3, text


def no_sequence(model: str, input_shape: tuple[int, ...]) -> tuple[bool, str]:
    """The rule, for `refuse`, of a model that takes sequences of tokens."""
    return len(
        input_shape
    ) != 1, f"name: {model} takes sequences (time,), but a sample is {tuple(input_shape)}"


def parameters_of(builder: Callable[..., Any]) -> Parameters:
    """What the builder takes by keyword, by name; `**anything` is among them under its own name."""
    try:
        signature = inspect.signature(builder, eval_str=True)
    except NameError:
        # A type that its author imports for type checkers only; then just the names are checked.
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
    """What is wrong with the options, one line each.

    Args:
        model: its name, for the messages.
        parameters: what its builder takes.
        options: as the config has them.
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
    """Whether a plain value is of this type; an annotation that is not plain lets everything
    through.

    A whole number is a number, a bool is neither, a list is any sequence.
    """
    if get_origin(annotation) in (UnionType, Union):
        return any(accepts(value, choice) for choice in get_args(annotation))
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if get_origin(annotation) in (tuple, list, Sequence):
        return isinstance(value, list | tuple) and all(
            accepts(item, get_args(annotation)[0]) for item in value
        )
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is annotation or annotation not in WORDS


def is_plain(annotation: Any) -> bool:
    """Whether values of this type can be written in a config: no functions, no classes."""
    if get_origin(annotation) in (UnionType, Union, tuple, list, Sequence):
        return all(is_plain(argument) for argument in get_args(annotation) if argument is not ...)
    return get_origin(annotation) is Literal or annotation in WORDS


def describe(annotation: Any) -> str:
    """What may be written for a value of this type, in words."""
    if get_origin(annotation) in (UnionType, Union):
        return " or ".join(describe(choice) for choice in get_args(annotation))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if get_origin(annotation) in (tuple, list, Sequence):
        item = describe(get_args(annotation)[0])
        return f"a list of {item.removeprefix('a ')}{'s' if item.endswith('number') else ''}"
    return WORDS[annotation]
