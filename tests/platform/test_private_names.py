"""Private names of torch stand in shoal/platform/torch_private and nowhere else in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from tests.conventions.source_numbers import sources

HOME = "shoal/platform/torch_private/"
PRIVATE_OF_OTHERS = {
    *("_replace", "_asdict", "_fields"),  # named tuples
    *("_exit", "_getframe", "_current_frames"),  # os, sys
    *("_run_exitfuncs", "_actions", "_Pointer"),  # atexit, argparse, ctypes
    *("_forkserver", "_forkserver_pid", "_resource_tracker", "_pid", "_fd"),  # multiprocessing
    "_registry",  # weakref.finalize
    *("_after_closure", "_make_zero_grad_fn", "_training_step"),  # Lightning
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_torch() -> set[str]:
    """Private names that objects of torch have: modules, tensors, parameters, groups."""
    module: Any = nn.MultiheadAttention(2, 1)
    owners = (torch, Tensor, module, nn.Parameter, DistributedDataParallel)
    owners += (dist.ProcessGroup, dist.Work, dist.Backend, distributed_c10d, torch.UntypedStorage)
    found = {name for owner in owners for name in dir(owner)}
    return {name for name in found if is_private(name)}


def names_that(nodes: list[ast.AST]) -> set[str]:
    """Private names that a file gives: functions, classes, variables, attributes."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def private_uses(
    nodes: list[ast.AST], of_torch: set[str], given: set[str]
) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of torch that a file uses.

    Args: of_torch: private names that torch has. given: those that files of ours give.
    """
    own, words_of_torch = names_that(nodes), of_torch - {"_C"}  # torchvision has a library _C too
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, word) for word in words if is_private(word))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            yield from ((node.lineno, name) for name in names if "._" in name)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            receiver = ast.unparse(node.value)
            # An object of ours may derive from one of torch's, and give names of its own.
            if receiver in ("self", "cls", "super()"):
                is_torchs = node.attr in of_torch - own
            else:
                is_torchs = node.attr in of_torch or node.attr not in given
            if is_torchs and node.attr not in PRIVATE_OF_OTHERS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant):
            text = str(node.value)
            if text in words_of_torch or text.startswith("torch._"):
                yield node.lineno, text


def uses_in(text: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(text)))
    return [name for _, name in private_uses(nodes, names_of_torch(), names_that(nodes))]


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    package = [source for source in sources("shoal") if not source.name.startswith(HOME)]
    given = {name for source in sources("shoal") for name in names_that(source.nodes)}
    given = {name for name in given if is_private(name)}
    of_torch = names_of_torch()
    found = [
        f"{source.name}:{line}: {name}"
        for source in package
        for line, name in private_uses(source.nodes, of_torch, given)
    ]
    assert not found, "give these a function in shoal/platform/torch_private:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch._C import Future", ["_C"]),
        ("from torch.utils import _pytree", ["_pytree"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("torch._foreach_mul_(a, 2)", ["_foreach_mul_"]),
        ("buffer._version", ["_version"]),
        ("anything._that_nobody_here_gives", ["_that_nobody_here_gives"]),
        ("class A(nn.Module):\n  def f(self): return self._buffers", ["_buffers"]),
        ("class A:\n  def f(self): self._buffers = []; return self._buffers", []),
        ("getattr(parameter, '_backward_hooks')", ["_backward_hooks"]),
        ("importlib.import_module('torch._dynamo')", ["torch._dynamo"]),
        ("import torch.nn; torch.nn.Module().__dict__; batch._replace(scale=1)", []),
    ],
)
def test_a_private_name_is_found_however_it_is_written(text: str, expected: list[str]) -> None:
    assert uses_in(text) == expected
