"""Verbs, options, settings, strategies, verified cells, the public API and the wire's numbers.

All but the wire's numbers and the cells is asked of the command line and of `shoal` itself.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import shoal as package

from .commands import Ended, shoal

ROOT = Path(__file__).parents[2]
NOWHERE = "/nonexistent"
BAD_JOB = ["digits", "--seed", "-1"]
HARMLESS = {
    "train": BAD_JOB,
    "import": ["weights.safetensors", *BAD_JOB],
    "config": BAD_JOB,
    "verify": BAD_JOB,
    "plan-tensor": BAD_JOB,
    "replay": [NOWHERE],
    "scale": [NOWHERE, "2"],
    "export": [NOWHERE],
    "eval": [NOWHERE],
    "plot": [NOWHERE, NOWHERE],
    "trace": [NOWHERE],
    "servers": [NOWHERE, "remove", "0", "1"],
    "schedule": ["nonexistent"],
    "launch": ["-n", "1", f"{NOWHERE}.py", "an", "argument"],
    "doctor": ["nonexistent"],
}
"""Arguments of each verb that are refused once all options have been read, before any work."""
ALGORITHMS = ["backend", "ring", "tree", "halving-doubling", "hierarchical", "auto"]
VALUES = {
    "--allreduce": ALGORITHMS,
    "--accumulate": ["2"],
    "--checkpoint": ["latest", "best"],
    "--import": ["file.py"],
    "--microbatches": ["4"],
    "--out": ["runs/elsewhere"],
    "--output": ["picture.png"],
    "--processes": ["2"],
    "--ranks": ["2"],
    "--stages": ["2"],
    "--step": ["3"],
    "--steps": ["3"],
    "--strategy": ["ddp"],
    "--tensor": ["2"],
    "--tolerance": ["1e-9"],
    "--trace": ["", "3@12"],
    "--trace-to": ["."],
}
"""Values to give each option that takes one; an empty one for an option that may stand alone."""
OF_A_VERB = {
    ("launch", "--output"): ["first", "all"],
    ("launch", "--allreduce"): [f"{name} --strategy ddp" for name in ALGORITHMS],
    ("export", "--output"): ["model.safetensors"],
    ("replay", "--output"): ["model.safetensors"],
    ("train", "--restarts"): ["2 -n 1"],
    ("import", "--restarts"): ["2 -n 1"],
}
"""Values of an option that means something else in this verb, and words that it needs beside it."""
ASKED_OTHERWISE = ("--help", "--help-all", "-h", "--cfg")
UNNAMED = {
    verb: [["--strategy", "zero3"], ["--strategy=zero3"], ["--out", "runs/elsewhere"]]
    for verb in ("train", "import", "config", "verify", "plan-tensor")
}
"""Options that are accepted whether or not the help of a verb names them."""
STRATEGY_VALUES = {
    "allreduce": ALGORITHMS,
    "balance": ["time", "parameters"],
    "bucket_mb": ["25.0", "1"],
    "budget_mb": ["0.0", "10"],
    "compress": ["none", "bf16", "fp16", "topk=0.1", "onebit"],
    "connections": ["1", "4"],
    "cut_by": ["", "head:column", "a.*:column+b:row"],
    "cuts": ["", "layers.1"],
    "degree": ["2"],
    "encrypt": ["true", "false"],
    "every": ["1", "4"],
    "hybrid": ["0", "2"],
    "lease_s": ["2.0", "5"],
    "microbatches": ["0", "4"],
    "offload": ["true", "false"],
    "outer_lr": ["0.7", "1"],
    "outer_momentum": ["0.9", "0"],
    "part_mb": ["4.0", "1"],
    "ranks": ["2"],
    "replicas": ["1", "2"],
    "schedule": ["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"],
    "sequence": ["true", "false"],
    "servers": ["1", "2"],
    "shared_memory": ["true", "false"],
    "stages": ["0"],
    "staleness": ["0", "3", "async"],
    "table": [""],
    "unit": ["", "Linear"],
    "unused": ["true", "false"],
    "whole": ["", "head", "a.*+b"],
}
"""Values to give each option of a strategy."""
COMBINED = [
    "recompute=2,zero3,hybrid=2",
    "tensor=2,pipeline=2,zero1",
    "tensor,sequence=true,zero3",
    "pipeline=2,schedule=interleaved,stages=2,ddp",
    "ddp,compress=powersgd=4",
    "server=2,replicas=2,staleness=3",
    "local=4",
    "diloco=8,outer_lr=0.5",
]
"""Lines of several strategies, and of strategies with a value, as the pages write them."""
DISTRIBUUUU = """\
MODEL: {ARCH: resnet18, NUM_CLASSES: 1000, SYNCBN: false}
OPTIM: {BASE_LR: 0.2, LR_POLICY: cos, MAX_EPOCH: 100, WARMUP_EPOCHS: 5, WEIGHT_DECAY: 5.0e-05}
TRAIN: {BATCH_SIZE: 32, DATASET: ./data/ILSVRC/, IM_SIZE: 224, WORKERS: 4}
OUT_DIR: ./exp
"""
NOT_CONSTRUCTED = ("Run", "ShoalError", "Verdict")
"""Classes that users are given and do not construct."""
PAIRS = ["TRAIN.BATCH_SIZE", "128", "OPTIM.BASE_LR", "6.4"]


def recorded_now(directory: Path) -> dict[str, Any]:
    """The whole interface as it is. Files for commands are written to `directory`."""
    verbs = sorted(re.findall(r"^    ([a-z][a-z-]*)(?: |$)", shoal("--help").out, re.MULTILINE))
    return {
        "options": {verb: _options(verb) for verb in verbs},
        "settings": {name: settings(name) for name in _listed("config", "nonexistent")},
        "distribuuuu": distribuuuu(directory),
        "strategies": {name: _lines(name) for name in _strategies()} | {"combined": COMBINED},
        "cells": cells(),
        "api": api(),
        "wire": dict(wire()),
    }


def refusal(verb: str, words: list[str]) -> Ended:
    """How a verb with these options ends that is refused for its other arguments."""
    return shoal(verb, *words, *HARMLESS[verb])


def _options(verb: str) -> list[list[str]]:
    """Words for each option of a verb, and each of its values."""
    pages = shoal(verb, "--help-all"), shoal(verb, "--help")  # not all verbs have a long one
    named = list(_of_help(verb, next(page.out for page in pages if page.code == 0)))
    return [*named, *(words for words in UNNAMED.get(verb, []) if words not in named)]


def _of_help(verb: str, page: str) -> Iterator[list[str]]:
    for line in re.findall(r"^  (-.*?)(?:  |$)", page, re.MULTILINE):
        found = re.findall(r"(--?[a-z][\w-]*)( [^\s,]+)?", line)
        names, value = [name for name, _ in found], found[-1][1]
        for name in names:
            if name not in ASKED_OTHERWISE:
                texts = _values(verb, names[-1]) if value else [""]
                yield from ([name, *text.split()] for text in texts)


def _values(verb: str, option: str) -> list[str]:
    return OF_A_VERB.get((verb, option)) or VALUES[option]


def settings(name: str, *words: object) -> dict[str, Any]:
    """Every setting of an experiment, by its dotted name."""
    ended = shoal("config", name, *words)
    assert ended.code == 0, ended.err
    return dict(_leaves(yaml.safe_load(ended.out), ""))


def _leaves(value: Any, before: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values; a setting that is a mapping itself is a leaf."""
    for name, inner in value.items():
        here = f"{before}{name}"
        if isinstance(inner, dict) and not here.endswith(".options"):
            yield from _leaves(inner, f"{here}.")
        else:
            yield here, inner


def distribuuuu(directory: Path) -> dict[str, Any]:
    """The settings that a command line of distribuuuu stands for."""
    path = directory / "resnet18.yaml"
    path.write_text(DISTRIBUUUU)
    ended = shoal("config", "--cfg", path, *PAIRS)
    assert ended.code == 0, ended.err
    return dict(_leaves(yaml.safe_load(ended.out), ""))


def _strategies() -> list[str]:
    return _listed("config", "digits", "--strategy", "qqqq")


def _lines(name: str) -> list[str]:
    """A strategy with each value of each of its options."""
    ended = shoal("config", "digits", "--strategy", f"{name},qqqq=1")
    assert "qqqq" in ended.err
    options = re.findall(r"\w+", ended.err.partition("known: ")[2])
    found = [name]
    for option in options:
        found += [f"{name},{option}={text}" for text in STRATEGY_VALUES[option]]
    return found


def _listed(*words: str) -> list[str]:
    """The names that a refusal lists as known."""
    found = re.search(r"(?:known|built in are): (.*)", shoal(*words).err)
    assert found is not None, words
    return re.findall(r"[\w-]+", found[1])


def cells() -> dict[str, str]:
    """The verdict of each cell of docs/verified.json."""
    found = json.loads((ROOT / "docs/verified.json").read_text())
    return {_cell(*key): verdict for key, (verdict, *_) in found}


def _cell(model: str, strategy: str, ranks: int, accumulate: int) -> str:
    return f"{model} under {strategy} on {ranks} in {accumulate}"


def api() -> dict[str, list[str]]:
    """The parameters of what `shoal` offers, and of the public methods of its classes."""
    found = {}
    for name in package.__all__:
        value = getattr(package, name)
        found[name] = [] if name in NOT_CONSTRUCTED else _parameters(value)
        for method, inner in inspect.getmembers(value) if inspect.isclass(value) else ():
            if not method.startswith("_") and inspect.isfunction(inner):
                found[f"{name}.{method}"] = _parameters(inner)
    return found


def _parameters(value: Any) -> list[str]:
    return [name for name in inspect.signature(value).parameters if name != "self"]


def wire() -> Mapping[str, int]:
    """The numbers of the operations of the parameter servers' protocol, wherever they are defined.

    They are the members of the package's IntEnum that has PUSH and PULL.
    """
    for path in sorted((ROOT / "shoal").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "IntEnum" in [ast.unparse(b) for b in node.bases]:
                members = dict(_members(node))
                if {"PUSH", "PULL"} <= members.keys():
                    return members
    raise AssertionError("no IntEnum of the package has PUSH and PULL: the wire has lost its names")


def _members(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            yield line.targets[0].id, ast.literal_eval(line.value)
