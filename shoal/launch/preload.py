"""What a fork server imports before ranks are forked from it, so that it is imported once and
not in every rank.
"""

from __future__ import annotations

import ast

from shoal.platform.torch_private import DYNAMO

ALWAYS = (
    "shoal.launch.forkserver_init",  # must be the first
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "shoal.launch.rank",
)
TRAINING = (
    DYNAMO,
)  # imported by the first optimizer and by DistributedDataParallel; takes as long as torch
SIGNS_OF_TRAINING = ("optim", "DistributedDataParallel", "fully_shard", "compile", "shoal")
FORK_SAFE_MODULES = (
    "torch",
    "shoal",
)  # others might start threads or touch a device when they are imported


def for_script(source: str) -> list[str]:
    """What the script `source` will import, as far as it is safe to import it in a process that
    forks.
    """
    try:
        statements = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return []  # the ranks report it, with the line
    names = [
        alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names
    ]
    names += [
        node.module
        for node in statements
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    safe = {name for name in names if name.split(".")[0] in FORK_SAFE_MODULES and "._" not in name}
    return [*sorted(safe), *(TRAINING if any(sign in source for sign in SIGNS_OF_TRAINING) else ())]
