"""Checks of private names about tensors, their subclasses, kernels and nests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree


def asked(reading: Callable[[Tensor], Any]) -> Any:
    """What __torch_function__ of a subclass is given when something is read from it."""
    asked = []

    class Asked(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *_: Any) -> Any:
            asked.append(func)
            return None

    reading(torch.empty(1).as_subclass(Asked))
    return asked[0]


def _version(version: Any) -> bool:
    tensor = torch.zeros(2)
    before = version(tensor)
    tensor.add_(1)
    return bool(version(tensor) == before + 1)


def _base(base: Any) -> bool:
    tensor = torch.zeros(2, 2)
    return base(tensor[0]) is tensor and base(tensor) is None


def _saved_value(saved: Any) -> bool:
    """A mean of some labels, of one dimension, of torch's losses, and a quotient."""
    scores = torch.ones(4, 3, requires_grad=True)
    labels = torch.tensor([0, 1, 2, -100])
    nll = torch.nn.functional.cross_entropy(scores, labels).grad_fn
    squares = torch.nn.functional.mse_loss(scores, scores.detach()).grad_fn
    mean = scores.mean(-1).grad_fn
    quotient = (scores / torch.tensor(5.0)).grad_fn
    return bool(
        (saved(nll, "reduction"), saved(nll, "total_weight")) == (1, 3)
        and (saved(squares, "reduction"), saved(squares, "self").numel()) == (1, 12)
        and saved(squares, "total_weight") is None
        and saved(mean, "self_sym_sizes") == (4, 3)
        and saved(mean, "dim") in [(-1,), (2**64 - 1,)]
        and saved(quotient, "other") == 5
    )


def _is_zerotensor(is_zerotensor: Any) -> bool:
    tensors = torch._efficientzerotensor((2,)), torch.zeros(2)
    return [is_zerotensor(tensor) for tensor in tensors] == [True, False]


def _is_view(is_view: Any) -> bool:
    tensor = torch.zeros(2, 2)
    return is_view(tensor[0]) and not is_view(tensor)


def _has_hooks(has_hooks: Any) -> bool:
    plain, before, after = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    before.register_hook(lambda gradient: None)
    after.register_post_accumulate_grad_hook(lambda parameter: None)
    return [has_hooks(plain, p) for p in (plain, before, after)] == [False, True, True]


def _gradient_hooks(gradient_hooks: Any) -> bool:
    leaf, seen = torch.zeros(1, requires_grad=True), []
    empty = gradient_hooks(leaf) == {}
    leaf.register_hook(seen.append)
    hooks = dict(gradient_hooks(leaf))
    gradient_hooks(leaf).clear()
    (2 * leaf).sum().backward()
    silent = not seen
    gradient_hooks(leaf).update(hooks)
    (2 * leaf).sum().backward()
    return empty and silent and len(seen) == 1


def _accumulation_hooks(accumulation_hooks: Any) -> bool:
    leaf, seen = torch.zeros(1, requires_grad=True), []
    empty = accumulation_hooks(leaf) == {}
    leaf.register_post_accumulate_grad_hook(seen.append)
    hooks = dict(accumulation_hooks(leaf))
    accumulation_hooks(leaf).clear()
    (2 * leaf).sum().backward()
    silent = not seen
    accumulation_hooks(leaf).update(hooks)
    (2 * leaf).sum().backward()
    return empty and silent and len(seen) == 1


def _in_function_transform(in_function_transform: Any) -> bool:
    seen = [in_function_transform()]

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_function_transform())
        return x.sum()

    torch.func.vmap(torch.func.grad(noting))(torch.ones(2, 3))
    seen.append(in_function_transform())
    return seen == [False, True, False]


def _in_backward_pass(in_backward_pass: Any) -> bool:
    seen = [in_backward_pass()]
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(lambda gradient: seen.append(in_backward_pass()))
    (leaf * 2).backward()
    seen.append(in_backward_pass())
    return seen == [False, True, False]


def _schema_of(schema_of: Any) -> bool:
    aten = torch.ops.aten
    first, second = (argument.alias_info for argument in schema_of(aten.add_.Tensor).arguments[:2])
    writes = first.is_write and second is None and schema_of(aten.add_.Tensor).is_mutable
    return writes and not schema_of(aten.add.Tensor).is_mutable


def _rebuilds(flatten: Any) -> bool:
    from shoal.platform.torch_private.pytree import tree_unflatten, treespec_dumps, treespec_loads

    leaves, spec = flatten({"a": (1, [2]), "b": None})
    again = treespec_loads(treespec_dumps(spec))
    return tree_unflatten([5, 6, 7], again) == {"a": (5, [6]), "b": 7} and leaves == [1, 2, None]


def _lerps(foreach_lerp_: Any) -> bool:
    tensor = torch.zeros(1)
    foreach_lerp_([tensor], [torch.ones(1)], 0.25)
    return tensor.item() == 0.25


def _multiplies(foreach_mul_: Any) -> bool:
    tensor = torch.ones(1)
    foreach_mul_([tensor], 3.0)
    return tensor.item() == 3.0


def _copies(foreach_copy_: Any) -> bool:
    tensor = torch.zeros(1)
    foreach_copy_([tensor], [torch.ones(1)])
    return tensor.item() == 1.0


def _asserts(assert_async: Any) -> bool:
    assert_async(torch.tensor(True), "said")
    with pytest.raises(RuntimeError, match="said"):
        assert_async(torch.tensor(False), "said")
    return True


def _softmax(safe_softmax: Any) -> bool:
    return safe_softmax(torch.full((1, 2), -torch.inf), -1).tolist() == [[0.0, 0.0]]


def _zeroes(foreach_zero_: Any) -> bool:
    tensors = [torch.ones(2), torch.ones(1)]
    foreach_zero_(tensors)
    return not any(tensor.any() for tensor in tensors)


def _memory_of(memory_of: Any) -> bool:
    one, other = torch.zeros(2), torch.zeros(2)
    return memory_of(one) == memory_of(one[1:]) != memory_of(other)


def _memory_weak_ref(kind: Any) -> bool:
    tensor = torch.zeros(2)
    reference = kind(tensor.untyped_storage())
    lived = not reference.expired()
    del tensor
    return lived and bool(reference.expired())


def _register_pytree_node(register: Any) -> bool:
    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    register(Box, lambda box: ([box.inside], None), lambda inside, _: Box(*inside))
    return _pytree.tree_leaves(Box((1, 2))) == [1, 2]


CHECKS: dict[str, Callable[[Any], bool]] = {
    "tensor_state.READ_VERSION": lambda found: found == asked(lambda x: x._version),
    "tensor_state.READ_BASE": lambda found: found == asked(lambda x: x._base),
    "tensor_state.IS_VIEW": lambda found: found == asked(lambda x: x._is_view()),
    "tensor_state.is_zerotensor": _is_zerotensor,
    "tensor_state.version": _version,
    "tensor_state.base": _base,
    "tensor_state.is_view": _is_view,
    "tensor_state.has_hooks": _has_hooks,
    "tensor_state.gradient_hooks": _gradient_hooks,
    "tensor_state.accumulation_hooks": _accumulation_hooks,
    "tensor_state.in_backward_pass": _in_backward_pass,
    "tensor_state.in_function_transform": _in_function_transform,
    "tensor_state.schema_of": _schema_of,
    "tensor_state.memory_of": _memory_of,
    "tensor_state.MemoryWeakRef": _memory_weak_ref,
    "tensor_state.READ_NUMBER": lambda read: read(torch.tensor(1.5)) == 1.5,
    "tensor_state.saved_value": _saved_value,
    "pytree.register_pytree_node": _register_pytree_node,
    "pytree.tree_flatten": _rebuilds,
    "pytree.tree_unflatten": lambda found: callable(found),
    "pytree.treespec_dumps": lambda found: callable(found),
    "pytree.treespec_loads": lambda found: callable(found),
    "pytree.tree_leaves": lambda leaves: leaves({"a": (1, [2])}) == [1, 2],
    "pytree.tree_map": lambda map: map(lambda x: x + 1, {"a": (1, [2])}) == {"a": (2, [3])},
    "pytree.tree_map_only": lambda map: map(int, lambda x: x + 1, (1, ["b"])) == (2, ["b"]),
    "kernels.foreach_copy_": _copies,
    "kernels.foreach_lerp_": _lerps,
    "kernels.foreach_mul_": _multiplies,
    "kernels.foreach_zero_": _zeroes,
    "kernels.foreach_norm": lambda norm: norm([torch.tensor([3.0, 4.0])])[0].item() == 5.0,
    "kernels.flatten_dense_tensors": lambda flatten: (
        flatten([torch.tensor([[1.0, 2.0]]).T, torch.tensor(3.0)]).tolist() == [1.0, 2.0, 3.0]
    ),
    "kernels.assert_async": _asserts,
    "kernels.safe_softmax": _softmax,
}
