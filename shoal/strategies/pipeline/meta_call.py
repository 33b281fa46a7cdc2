"""Results that another stage computes: their shapes and dtypes, without computing.

y = x * mask       x is absent, mask follows from the batch      y is absent: x's meta * meta
y = block(x)       a copy of the block without memory runs on the meta device (`OutputForms`)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.data.seeds import preserve_rng_state
from shoal.data.tree_map import SPARSE
from shoal.platform.tensors import is_write
from shoal.platform.torch_private.module_state import HOOKS
from shoal.platform.torch_private.pytree import tree_flatten, tree_map, tree_unflatten
from shoal.strategies.pipeline.absent import (
    SHAPE_FUNCTIONS,
    AbsentTensor,
    ReceivedValues,
    WalkRefusal,
    absent_of,
    mark_absent,
    tensors_in,
)

VALUE_FUNCTIONS = frozenset(
    (
        *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"),
        *("__complex__", "__contains__", "__array__", "equal", "allclose", "is_nonzero"),
    )
)
"""Names of functions that look at values."""
_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")


def written_target(label: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that a function writes into; None if it makes a new one."""
    target = args[0] if args and is_write(label) else None
    target = kwargs.get("out") if target is None else target
    return target if isinstance(target, Tensor) else None


def call_on_meta(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    received: ReceivedValues,
) -> Any:
    """Call a torch function of which at least one argument is absent.

    Args: received: where absent results find their values; with the device of those whose arguments
        do not tell it.

    Returns: the results, absent tensors for tensors. An argument that is returned stays itself.

    Raises: WalkRefusal: the function needs values.
    """
    label = getattr(func, "__name__", "")
    arguments: dict[int, Tensor] = {}  # id of a meta tensor -> the argument for which it stands
    held = (x for x in tensors_in((args, kwargs)) if absent_of(x) is not None or not x.is_meta)
    device = next((x.device for x in held), received.device)
    target = written_target(label, args, kwargs)
    func, args, kwargs = _without_values(func, label, args, kwargs)
    try:
        with torch.no_grad():
            args, kwargs = tree_map(partial(_stand_in, arguments, label), (args, kwargs))
            out = func(*args, **kwargs)
    except Exception as error:  # whatever a kernel raises where it has no values
        raise WalkRefusal(
            f"pipeline: {label}() of a value that another rank computes needs the value itself: "
            f"{(str(error).splitlines() or [''])[0]}. Move the code that does so into a block."
        ) from error

    def to_absent(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        argument = arguments.get(id(value))
        is_returned = argument is not None and absent_of(argument) is not None
        return argument if is_returned else AbsentTensor(value, device, received)

    if target is not None and absent_of(target) is None:  # written into a real tensor
        if not target.is_meta:
            meta = target.detach().to("meta")
            mark_absent(target, AbsentTensor(meta, target.device, received))
        return None if out is None else target
    return tree_map(to_absent, out)


def _stand_in(arguments: dict[int, Tensor], label: str, value: Any) -> Any:
    """Return the meta tensor for a tensor, which is noted in `arguments`; "meta" for a device."""
    if isinstance(value, Tensor):
        if value.layout in SPARSE:  # dense, for these have no functions on the meta device
            meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
        else:
            meta = _meta_of(value)
        arguments[id(meta)] = value
        return meta
    may_be_name = label in ("to", "type") and isinstance(value, str)
    is_name = may_be_name and value.split(":")[0] in _DEVICE_TYPES
    return torch.device("meta") if isinstance(value, torch.device) or is_name else value


def _meta_of(value: Tensor) -> Tensor:
    """Return a tensor without memory in the form of one that may be absent."""
    absent = absent_of(value)
    return value.detach().to("meta") if absent is None else absent.meta


def _without_values(
    func: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call that does on meta what `func` does, where `func` itself would not."""
    if label == "where":  # torch would make tensors of its numbers on the CPU
        args = tuple(x if isinstance(x, Tensor) else torch.tensor(x, device="meta") for x in args)
    if label in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        args = (args[0], tuple(_indices(index)), *args[2:])
    if label == "_sparse_mm":  # of a graph that is at hand, for which a dense tensor stands
        return torch.mm, args[:2], {}
    if label in ("cpu", "cuda"):  # a copy on another device is a copy on meta
        return Tensor.clone, args[:1], {}
    return func, args, kwargs


def _indices(index: tuple[Any, ...]) -> Iterator[Any]:
    """Replace masks that are at hand by numbers of positions, so that the shape follows."""
    for item in index:
        if isinstance(item, Tensor) and item.dtype == torch.bool and absent_of(item) is None:
            yield from item.nonzero(as_tuple=True)
        else:
            yield item


_DEVICE_OF = Tensor.device.__get__
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU = Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
DEVICE_FUNCTIONS = frozenset((_DEVICE_OF, _IS_META, _IS_CPU, _IS_CUDA))


class _Leaf(NamedTuple):
    """One leaf of a unit's results.

    Attributes:
        kind: "same": the argument itself; "like": a tensor as that argument; "as": this form.
        value: the index of an argument; or a meta tensor, or any other value.
    """

    kind: str
    value: Any


class _Form(NamedTuple):
    """The results of a unit."""

    leaves: tuple[_Leaf, ...]
    spec: Any


class OutputForms:
    """The results of units, as far as shapes tell them.

    [1] A copy of the model without memory runs the unit on the meta device, once for each shape of
        its arguments. It is made before other strategies divide layers or put wrappers around them.
    [2] If [1] fails, because code inside looks at values, results are taken to be like the
        arguments as they were on the sample.

    Args: modules: name -> unit, with memory; a copy without memory is made.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        twin = _without_memory(model)
        self._twins = {name: twin.get_submodule(name) for name in modules}
        self._known: dict[Any, _Form] = {}
        self._likeness: dict[str, _Form] = {}

    def results(self, name: str, args: Any, kwargs: Any, received: ReceivedValues) -> Any:
        """Return what a unit gives for these arguments: absent tensors for tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        module = self._modules[name]
        key = (name, module.training, spec, tuple(form_of(leaf) for leaf in leaves))
        form = self._known.get(key)
        if form is None:
            form = self._known[key] = self._asked(name, leaves, spec, received.device)

        def made(leaf: _Leaf) -> Any:
            if leaf.kind == "same":
                return leaves[leaf.value]
            value = leaves[leaf.value] if leaf.kind == "like" else leaf.value
            if not isinstance(value, Tensor):
                return value
            # A tensor of its own: two results may look like one argument.
            return AbsentTensor(_meta_of(value).detach(), received.device, received)

        return tree_unflatten([made(leaf) for leaf in form.leaves], form.spec)

    def learn_likeness(self, name: str, leaves: list[Any], out: Any) -> None:
        """Note how the results of a unit look like its arguments, in a run with memory."""
        form = _form_of_results(leaves, out)
        # All tensors among the results look like arguments.
        if all(leaf.kind != "as" or not isinstance(leaf.value, Tensor) for leaf in form.leaves):
            self._likeness[name] = form

    def _asked(self, name: str, leaves: list[Any], spec: Any, device: torch.device) -> _Form:
        """Run the unit without memory."""
        twin = self._twins[name]
        for inner, own in zip(twin.modules(), self._modules[name].modules(), strict=False):
            inner.training = own.training
        args, kwargs = tree_unflatten(leaves, spec)
        try:
            with preserve_rng_state([device]), _OnMeta(device):
                return _form_of_results(leaves, twin.forward(*args, **kwargs))
        except (WalkRefusal, Exception) as error:  # the unit's own code raises what it likes
            if name in self._likeness:
                return self._likeness[name]
            raise WalkRefusal(
                f"pipeline: the shapes that {name} returns cannot be told without computing it: "
                f"{(str(error).splitlines() or [''])[0]}. Name the modules at which stages begin, "
                "with cuts=NAME, so that it is divided or lies in the last stage."
            ) from error


class _OnMeta(TorchFunctionMode):
    """Runs functions on the meta device if an argument is absent or has no memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.received = ReceivedValues(None, ["it"], device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DEVICE_FUNCTIONS:
            return device_answer(func, args[0], self.received.device)
        if func in SHAPE_FUNCTIONS:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if not any(absent_of(x) is not None or _IS_META(x) for x in tensors):
            return func(*args, **kwargs)
        return call_on_meta(func, args, kwargs, self.received)


def device_answer(func: Any, tensor: Tensor, device: torch.device) -> Any:
    """Tell the device of a tensor; `device` for one that has no memory on this rank.

    Code that makes tensors `device=x.device` must not make them without memory.
    """
    if isinstance(tensor, AbsentTensor) or not _IS_META(tensor):
        return func(tensor)
    if func == _DEVICE_OF:
        return device
    return func != _IS_META and device.type == ("cpu" if func == _IS_CPU else "cuda")


def form_of(value: Any) -> Any:
    """Return what determines the shapes that follow from a value; hashable."""
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.shape), value.dtype
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return type(value)


def _form_of_results(leaves: list[Any], out: Any) -> _Form:
    """Describe results by their likeness to the arguments, else as they are."""
    results, spec = tree_flatten(out)
    return _Form(tuple(_leaf_of(result, leaves) for result in results), spec)


def _leaf_of(result: Any, leaves: list[Any]) -> _Leaf:
    if not isinstance(result, Tensor):
        for index, leaf in enumerate(leaves):
            if leaf is result and not isinstance(result, (bool, int, float, str, type(None))):
                return _Leaf("same", index)
        return _Leaf("as", result)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and form_of(leaf) == form_of(result):
            return _Leaf("like", index)
    return _Leaf("as", _meta_of(result))


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors have shapes and no memory.

    Raises: WalkRefusal: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    for module in model.modules():
        for value in vars(module).values():  # a weight that a hook has computed has a graph
            if isinstance(value, Tensor):
                memo.setdefault(id(value), value.detach().to("meta"))
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # whatever an attribute of the model raises
        raise WalkRefusal(
            f"pipeline: {type(model).__name__} cannot be copied by copy.deepcopy, which the shapes "
            f"between stages are found with: {error}. Keep what cannot be copied out of the model."
        ) from error
    for module in twin.modules():
        for kind in HOOKS:  # they are for values, and belong to whoever registered them
            getattr(module, kind).clear()
    return twin
