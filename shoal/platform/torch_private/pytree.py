"""Nests of tensors: tuples, lists, dicts, named tuples and what users have registered.

Why: torch has no public module of the kind, and models return nests of any class that was
registered with this one. Without: outputs of Hugging Face's models, which register theirs, would be
taken for one leaf. Aliases, for torch.compile knows these objects. Checked: 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "register_pytree_node",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
