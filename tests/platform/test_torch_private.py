"""Each private name of torch that Shoal stands on does what shoal/platform/torch_private says of
it.

An upgrade of torch that takes a name away, or gives it another meaning, fails here with that name.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shoal.platform.torch_private
from shoal.platform.torch_private.data_workers import set_worker_info, without_default_group
from shoal.testing import world

HOME = Path(shoal.platform.torch_private.__file__).parent


def given_names() -> list[str]:
    """All names that torch_private gives, as module.name."""
    found = []
    for path in sorted(HOME.glob("[!_]*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found.append(f"{path.stem}.{node.name}")
            elif isinstance(node, ast.AnnAssign):
                found.append(f"{path.stem}.{ast.unparse(node.target)}")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found += [f"{path.stem}.{name}" for name in ast.literal_eval(node.value)]
            elif isinstance(node, ast.Assign):
                found.append(f"{path.stem}.{ast.unparse(node.targets[0])}")
    return found


def _dispatch_mode(mode: Any) -> bool:
    class Random(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(torch.Tag.nondeterministic_seeded in func.tags)
            return func(*args, **(kwargs or {}))

    seen: list[bool] = []
    with Random():
        torch.zeros(2).bernoulli_(0.5)
    return seen[-1] and not seen[0]


@pytest.mark.parametrize("name", given_names())
def test_a_name_does_in_this_torch_what_is_said_of_it(name: str) -> None:
    module, _, member = name.partition(".")
    assert name in CHECKS, f"write a check of shoal.platform.torch_private.{name}"
    needs = f"shoal.platform.torch_private.{name}, which stands on a private name of torch,"
    try:
        found = getattr(importlib.import_module(f"shoal.platform.torch_private.{module}"), member)
        holds = CHECKS[name](found)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said with name and version
        pytest.fail(f"{needs} does not work with torch {torch.__version__}: {error!r}")
    assert holds, f"{needs} does something else in torch {torch.__version__}"


def test_no_check_is_left_of_a_name_that_is_gone() -> None:
    assert CHECKS.keys() - given_names() == set()


def _asked(reading: Callable[[Tensor], Any]) -> Any:
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
    return [has_hooks(p) for p in (plain, before, after)] == [False, True, True]


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


def _replace_call(replace_call: Any) -> bool:
    layer, seen = nn.Linear(1, 1), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    before = replace_call(layer, lambda text: text * 2)
    replaced = layer("ab") == "abab" and not seen
    replace_call(layer, before)
    return replaced and layer(torch.ones(1)).shape == (1,) and seen == [1]


def _disables_modes(disable: Any) -> bool:
    class Counting(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Counting():
        with disable():
            torch.zeros(2)
        hidden = not seen
        torch.zeros(2)
    return hidden and bool(seen)


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


def _own_parameters(own_parameters: Any) -> bool:
    layer = nn.Linear(2, 2, bias=False)
    found = own_parameters(layer)
    weight = found["weight"]
    found["weight"] = None
    return list(found) == ["weight", "bias"] and layer.weight is None and weight is not None


def _own_buffers(own_buffers: Any) -> bool:
    layer, other = nn.BatchNorm1d(2), torch.ones(2)
    own_buffers(layer)["running_mean"] = other
    return layer.running_mean is other


def _own_modules(own_modules: Any) -> bool:
    model, other = nn.Sequential(nn.ReLU()), nn.Tanh()
    own_modules(model)["0"] = other
    return model[0] is other


def _non_persistent_buffers(non_persistent_buffers: Any) -> bool:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("dropped", torch.zeros(1), persistent=False)
    found = non_persistent_buffers(module) == {"dropped"}
    non_persistent_buffers(module).add("saved")
    return found and not module.state_dict()


def _hooked() -> dict[str, nn.Module]:
    kinds = ("none", "output", "input", "keywords", "backward", "before")
    found = {kind: nn.Linear(1, 1) for kind in kinds}
    found["output"].register_forward_hook(_hook)
    found["input"].register_forward_pre_hook(_hook)
    found["keywords"].register_forward_pre_hook(_hook, with_kwargs=True)
    found["backward"].register_full_backward_hook(_hook)
    found["before"].register_full_backward_pre_hook(_hook)
    return dict(found)


def _hook(*_: Any) -> None:
    """A hook that changes nothing."""


def _says_of(*expected: str) -> Callable[[Any], bool]:
    """A check that a function is true of modules with these hooks, and of no other."""
    return lambda asks: {kind for kind, layer in _hooked().items() if asks(layer)} == set(expected)


def _hooks(names: Any) -> bool:
    any_hooks = _says_of("output", "input", "keywords", "backward", "before")
    return any_hooks(lambda layer: any(getattr(layer, name) for name in names))


def _is_compiled(is_compiled: Any) -> bool:
    layer, compiled = nn.Linear(1, 1), nn.Linear(1, 1)
    with warnings.catch_warnings():  # torch's compiler imports what torch deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled.compile()
    return is_compiled(compiled) and not is_compiled(layer)


def _has_one_width(has_one_width: Any) -> bool:
    attentions = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=3)
    return [has_one_width(attention) for attention in attentions] == [True, False]


def _hides_from_modes(disable: Any) -> bool:
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Watching(), disable():
        tensor.clone()
    return seen == []


def _disables(disable: Any) -> bool:
    with disable():
        try:
            _asked(lambda tensor: tensor.shape)
        except IndexError:  # nobody was asked
            return True
    return False


def _made(make_wrapper_subclass: Any) -> bool:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise AssertionError

    made = make_wrapper_subclass(Wrapper, (3, 10**12), dtype=torch.float64)
    return type(made) is Wrapper and made.shape == (3, 10**12) and made.dtype == torch.float64


def _function_modes(function_modes: Any) -> bool:
    with (mode := TorchFunctionMode()):
        return any(found is mode for found in function_modes())


def _device_mode(kind: Any) -> bool:
    from shoal.platform.torch_private.subclasses import function_modes

    with torch.device("cpu"):
        return any(isinstance(mode, kind) for mode in function_modes())


def _is_made_of_tensors(is_made_of_tensors: Any) -> bool:
    plain = nn.Parameter(torch.zeros(1))
    return not is_made_of_tensors(plain) and world.run(1, _asks_of_a_dtensor) == [True]


def _asks_of_a_dtensor() -> bool:
    from shoal.platform.torch_private.subclasses import is_made_of_tensors

    return is_made_of_tensors(distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,))))


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


def _clipping_calls(name: str) -> int:
    """How often clipping the gradients of one parameter by norm calls a function of this name."""
    from shoal.platform.torch_private import clip_grad

    calls = []

    def noting(original: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*args, **options)

        return noted

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    put_back = clip_grad.replace(name, noting)
    nn.utils.clip_grad_norm_([weight], 1.0)
    put_back()
    seen = len(calls)
    nn.utils.clip_grad_norm_([weight], 1.0)
    return seen if len(calls) == seen else -1


def _watches_numbers() -> bool:
    from shoal.platform.torch_private.dtensor_values import watch_numbers

    seen: list[DTensor] = []
    end = watch_numbers(seen.append)
    tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    read = float(tensor.sum())
    end()
    tensor.sum().item()
    return read == 2.0 and len(seen) == 1


def _replaces_functional_call(replace: Any) -> bool:
    from torch.func import functional_call

    calls = []

    def noting(original: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            calls.append(args[0])
            return original(*args, **options)

        return noted

    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    put_back = replace(noting)
    found = functional_call(model, {"weight": torch.zeros(1, 1)}, (x,))
    put_back()
    functional_call(model, {"weight": torch.zeros(1, 1)}, (x,))
    return found.item() == 0.0 and calls == [model]


def _lets_functions_alone(disabled: Any) -> bool:
    class Named(Tensor):
        __torch_function__ = disabled

    named = torch.ones(2).as_subclass(Named)
    return type(named) is Named and type(named + named) is Tensor


def _pops_a_mode(pop_mode_temporarily: Any) -> bool:
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Seeing():
        with pop_mode_temporarily():
            torch.ones(2).exp()
        inside = len(seen)
        torch.ones(2).exp()
    return inside == 0 and len(seen) > 0


def _default_store() -> bool:
    from shoal.platform.torch_private.c10d import default_store

    default_store().set("said", "here")
    dist.barrier()
    return default_store().get("said") == b"here"


def _process_groups() -> bool:
    from shoal.platform.torch_private.c10d import process_groups

    made = dist.new_group(backend="gloo")
    return process_groups() == [dist.group.WORLD, made]


def _backend_for() -> bool:
    from shoal.platform.torch_private.c10d import backend_for

    group = dist.new_group(backend="gloo")
    return isinstance(backend_for(group, torch.device("cpu")), dist.ProcessGroupGloo)


def _add_backend() -> bool:
    from shoal.platform.torch_private.c10d import add_backend, backend_for

    gloo = backend_for(dist.new_group(backend="gloo"), torch.device("cpu"))
    group = dist.ProcessGroup(dist.get_rank(), 2)
    add_backend(group, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    total = torch.ones(1)
    group.allreduce([total]).wait()
    group.barrier().wait()
    return backend_for(group, torch.device("cpu")) is gloo and total.item() == 2.0


def _source_rank() -> bool:
    from shoal.platform.torch_private.c10d import source_rank

    group, tensor = dist.new_group(backend="gloo"), torch.zeros(1)
    if dist.get_rank() == 1:
        dist.send(tensor, 0, group=group)
        return True
    work: Any = group.recv_anysource([tensor], 0)
    work.wait()
    return source_rank(work) == 1


class _OneOrTwo(nn.Module):
    """Uses its second layer if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found: Tensor = self.first(x)
        return found + self.second(x) if both else found


def _check_reducer_finalized() -> bool:
    from shoal.platform.torch_private.c10d import check_reducer_finalized

    engine = DistributedDataParallel(_OneOrTwo(), process_group=dist.new_group(backend="gloo"))
    engine(torch.ones(1, 1), True).sum().backward()
    check_reducer_finalized(engine)
    engine(torch.ones(1, 1), False).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank \d: 2 3"):
        check_reducer_finalized(engine)
    return True


def _runs_a_unit_without_calling_it() -> bool:
    from shoal.platform.torch_private.fsdp import post_forward, pre_forward

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    named = pre_forward(model[0], {"named": 1})
    gathered = not isinstance(model[0].weight, DTensor)
    post_forward(model[0], None)
    return named == {"named": 1} and gathered and isinstance(model[0].weight, DTensor)


def _is_gathered_until_reset() -> bool:
    from shoal.platform.torch_private.fsdp import is_gathered, pre_forward, reset_after_error

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    before = is_gathered(model[0])
    pre_forward(model[0], {})
    during = is_gathered(model[0])
    reset_after_error(model)
    return (before, during, is_gathered(model[0])) == (False, True, False)


def _cuts_in_strides(placement: Any) -> bool:
    made = placement(0, split_factor=2)
    return (made.dim, made.split_factor) == (0, 2) and all(world.run(4, _whole_of_strides))


def _whole_of_strides() -> bool:
    """Put together rows 0 to 3, which were cut by two ranks and then by two more."""
    from torch.distributed.tensor import Shard

    from shoal.platform.torch_private.fsdp import StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    shard, tensor = mesh.get_coordinate() or (0, 0)
    own = torch.tensor([[float(2 * tensor + shard)]])
    placements = [StridedShard(0, split_factor=2), Shard(0)]
    made = DTensor.from_local(own, mesh, placements, run_check=False)
    return made.full_tensor().flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def _halves(_: Any) -> bool:
    from shoal.platform.torch_private.pipelining import stage_backward_input, stage_backward_weight

    layer, x = nn.Linear(2, 2).double(), torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    expected = x.grad, layer.weight.grad
    x.grad = layer.weight.grad = layer.bias.grad = None
    (of_x,), groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    nothing_yet = layer.weight.grad is None
    stage_backward_weight(layer.parameters(), groups)
    found = of_x, layer.weight.grad
    return nothing_yet and all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


class _Renumbered(IterableDataset):
    """Gives the number of the worker, and the data set, that it is told after a replacement."""

    def __iter__(self) -> Iterator[Any]:
        set_worker_info(7, 9, 0, "the user's")
        info = get_worker_info()
        assert info is not None
        yield info.id, info.num_workers, info.dataset


def _replaces_worker_info(_: Any) -> bool:
    found = next(iter(DataLoader(_Renumbered(), None, num_workers=1)))
    return list(found) == [7, 9, "the user's"]


def _hides_group() -> bool:
    with without_default_group():
        hidden = not dist.is_initialized()
    return hidden and dist.get_world_size() == 2


def _over(ranks: int, function: Callable[[], bool]) -> Callable[[Any], bool]:
    return lambda _: all(world.run(ranks, function))


def _replaces_backward_call(replace: Any) -> bool:
    calls = []

    def noting(original: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            calls.append(1)
            return original(*args, **options)

        return noted

    x = torch.ones(1, requires_grad=True)
    put_back = replace(noting)
    try:
        x.sum().backward()
        torch.autograd.grad(x.sum(), x)
    finally:
        put_back()
    x.sum().backward()
    return len(calls) == 2


CHECKS: dict[str, Callable[[Any], bool]] = {
    "tensor_state.READ_VERSION": lambda found: found == _asked(lambda x: x._version),
    "tensor_state.READ_BASE": lambda found: found == _asked(lambda x: x._base),
    "tensor_state.IS_VIEW": lambda found: found == _asked(lambda x: x._is_view()),
    "tensor_state.is_zerotensor": _is_zerotensor,
    "tensor_state.version": _version,
    "tensor_state.base": _base,
    "tensor_state.is_view": _is_view,
    "tensor_state.has_hooks": _has_hooks,
    "tensor_state.gradient_hooks": _gradient_hooks,
    "tensor_state.in_backward_pass": _in_backward_pass,
    "tensor_state.schema_of": _schema_of,
    "tensor_state.ATEN_TO_COPY": lambda found: str(found) == "aten._to_copy.default",
    "tensor_state.ATEN_UNSAFE_VIEW": lambda found: str(found) == "aten._unsafe_view.default",
    "module_state.BatchNormBase": lambda kind: (
        all(issubclass(layer, kind) for layer in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
        and not issubclass(nn.InstanceNorm1d, kind)
    ),
    "module_state.NormBase": lambda kind: (
        all(issubclass(layer, kind) for layer in (nn.BatchNorm1d, nn.InstanceNorm3d))
        and not issubclass(nn.LayerNorm, kind)
    ),
    "module_state.DropoutBase": lambda kind: all(
        issubclass(layer, kind) for layer in (nn.Dropout, nn.Dropout3d, nn.AlphaDropout)
    ),
    "module_state.STORES": lambda names: set(names) <= vars(nn.Module()).keys(),
    "module_state.HOOKS": _hooks,
    "module_state.own_parameters": _own_parameters,
    "module_state.own_buffers": _own_buffers,
    "module_state.own_modules": _own_modules,
    "module_state.non_persistent_buffers": _non_persistent_buffers,
    "module_state.forward_pre_hooks": _says_of("input", "keywords"),
    "module_state.has_forward_hooks": _says_of("output"),
    "module_state.has_backward_hooks": _says_of("backward", "before"),
    "module_state.is_compiled": _is_compiled,
    "module_state.replace_call": _replace_call,
    "module_state.has_one_width": _has_one_width,
    "subclasses.DispatchMode": _dispatch_mode,
    "subclasses.disable_dispatch_modes": _disables_modes,
    "subclasses.make_wrapper_subclass": _made,
    "subclasses.DisableTorchFunctionSubclass": _disables,
    "subclasses.DisableTorchFunction": _hides_from_modes,
    "subclasses.DISABLED_TORCH_FUNCTION": _lets_functions_alone,
    "subclasses.pop_mode_temporarily": _pops_a_mode,
    "subclasses.function_modes": _function_modes,
    "subclasses.DeviceMode": _device_mode,
    "subclasses.is_made_of_tensors": _is_made_of_tensors,
    "data_workers.set_worker_info": _replaces_worker_info,
    "data_workers.without_default_group": _over(2, _hides_group),
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
    "kernels.FUNCTIONS_OF_LISTS": lambda names: all(callable(getattr(torch, n)) for n in names),
    "kernels.foreach_norm": lambda norm: norm([torch.tensor([3.0, 4.0])])[0].item() == 5.0,
    "kernels.assert_async": _asserts,
    "kernels.safe_softmax": _softmax,
    "clip_grad.TOTAL_NORM": lambda name: _clipping_calls(name) == 1,
    "clip_grad.USES_LISTS": lambda name: _clipping_calls(name) > 0,
    "clip_grad.replace": lambda _: _clipping_calls("_get_total_norm") == 1,
    "dtensor_values._READ_NUMBER": lambda found: str(found) == "aten._local_scalar_dense.default",
    "dtensor_values.watch_numbers": _over(1, _watches_numbers),
    "stateless.replace_functional_call": _replaces_functional_call,
    "backward_calls._PLACES": lambda found: all(
        hasattr(place, "_engine_run_backward") for place in found
    ),
    "backward_calls._NAME": lambda found: found == "_engine_run_backward",
    "backward_calls.replace_backward_call": _replaces_backward_call,
    "c10d.GradBucket": lambda found: found is dist.GradBucket,  # type: ignore[attr-defined]
    "c10d.Options": lambda found: all(
        hasattr(found, f"{name}Options") for name in ("Barrier", "AllreduceCoalesced", "Allgather")
    ),
    "c10d.default_store": _over(2, _default_store),
    "c10d.process_groups": _over(2, _process_groups),
    "c10d.backend_for": _over(2, _backend_for),
    "c10d.add_backend": _over(2, _add_backend),
    "c10d.ALL_GATHER_FLAT": lambda name: callable(getattr(dist.ProcessGroupGloo, name)),
    "c10d.REDUCE_SCATTER_FLAT": lambda name: callable(getattr(dist.ProcessGroupGloo, name)),
    "c10d.source_rank": _over(2, _source_rank),
    "c10d.check_reducer_finalized": _over(2, _check_reducer_finalized),
    "fsdp.StridedShard": _cuts_in_strides,
    "fsdp.pre_forward": _over(2, _runs_a_unit_without_calling_it),
    "fsdp.post_forward": _over(2, _runs_a_unit_without_calling_it),
    "fsdp.is_gathered": _over(2, _is_gathered_until_reset),
    "fsdp.reset_after_error": _over(2, _is_gathered_until_reset),
    "fsdp._reset": _over(2, _is_gathered_until_reset),  # where torch has none of its own
    "pipelining.stage_backward_input": _halves,
    "pipelining.stage_backward_weight": _halves,
}
