"""Functions of torch that are given a shard of a weight: right, or an error that says what to do.

mean.lerp_(parameter, 0.1)      an average of weights; the parameter is a DTensor, the mean is whole
F.linear(x, parameter)          the input is whole
p.tolist(), torch.renorm(p)     torch reads no shards, or knows no rule for them

p.grad.norm()                   a DTensor: each rank has the norm of its shard
p.grad.norm().sqrt()            torch combines the parts
p.grad.norm().item()            torch returns this rank's part: an error

torch.randn_like(weight)        torch would draw a rank's shard from the start of its stream, so
nn.init.normal_(weight, 0, 0.1) ranks with one seed would all get the same numbers. Each rank draws
                                for the whole weight and keeps its part: one device's numbers where
                                the generator is in one state on all ranks, else with a note

weight.data[:-1].div_(2)        torch gathers what cuts across shards, and would write into the copy
                                alone: an error

weight.data = weight.data / 2   torch would put the values beside the shard, which stays as it is:
                                they are copied into it

weight.new_zeros(1, n, 24)      a tensor of its own, such as a hidden state: a whole one

copy.deepcopy(model)            without gradients, whose memory an engine may have freed

torch asks the class of shards about each function that is given one, so one method is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.assembly import shard_like
from shoal.comm.norm import full_tensor
from shoal.data.draws import FILLING_FUNCTIONS
from shoal.errors import UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.pytree import tree_leaves, tree_map
from shoal.platform.torch_private.replaced_functions import answer_for_shards, watch_numbers
from shoal.platform.torch_private.tensor_state import base, memory_of
from shoal.run.guards.guarded_models import GuardedModels, ModuleHook, ProcessWidePatch

_IN_A_STEP = dict.fromkeys(
    (
        *("embedding", "linear", "bilinear", "cosine_similarity", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "layer_norm", "group_norm"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm", "gru", "rnn_tanh"),
    ),
    " Where a layer is called without its model, do so in a function: run.call(function, *args), "
    "on all ranks; in a step, compute_loss.",
) | dict.fromkeys(
    ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    " A loss of parameters belongs into compute_loss: zero2 and tensor give whole ones there.",
)
_NEW = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
"""Methods that take a dtype and a device from a tensor, and no values."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""The setter that torch calls for `parameter.data = values`."""
_MIXED = ("got mixed torch.Tensor and DTensor", "different device mesh")
_DRAWN = (
    "note: the script{place} draws random numbers for a weight or a gradient that lies in shards: "
    "each data rank draws those of its shards, so same distribution, other numbers than on one "
    "device. Those of a generator with one seed on all ranks are one device's: "
    "torch.empty_like(weight).normal_(generator=torch.Generator().manual_seed(step))."
)
_UNREADABLE = (
    *("not supported for tensor subclasses", "not have a sharding strategy registered"),
    *("Sharding propagation failed", "as_strided not supported with DTensor"),
)


def guard_shards(guarded: GuardedModels, undo: ExitStack) -> None:
    """Look at functions that are given shards, if parameters are shards, until `undo` is closed."""
    if not guarded.local_model.has_sharded_params:
        return
    _shards.add(guarded, undo)
    for _, module in guarded.modules():
        # It writes 0 for padded tokens where no class of its parameters answers for itself.
        if isinstance(module, nn.TransformerEncoder):
            before, after = (ModuleHook(end) for end in (_shards.pause, _shards.go_on))
            undo.callback(module.register_forward_pre_hook(before).remove)
            undo.callback(module.register_forward_hook(after, always_call=True).remove)


def _install(patch: ProcessWidePatch) -> Callable[[], None]:
    def call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if args and _is_in_place(name) and _is_sliced_copy(args[0]):
            raise _unreadable(name, patch.active)
        if name in FILLING_FUNCTIONS or getattr(func, "__module__", "") == nn.init.__name__:
            _note_draw(patch.active, kwargs)
            return _drawn(func, args, kwargs)
        if name in _NEW:
            return func(args[0].to_local(), *args[1:], **kwargs)
        if name == "share_memory_":  # torch would end the process by a signal
            raise _unreadable(name, patch.active)
        if name == "__deepcopy__":
            return _copied(func, *args)
        if func == _SET_DATA and _fits(*args):
            return _write_data(*args)
        if args and type(args[0]) is Tensor and not args[0].dim() and _is_in_place(name):
            # torch would write the number, and then fail by an assertion without words.
            args = [full_tensor(x) if isinstance(x, DTensor) else x for x in args]
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            explained = _explained(name.strip("_"), error, patch.active)
            if explained is None:
                raise
            raise explained from error

    undo = ExitStack()
    undo.callback(answer_for_shards(call))
    undo.callback(watch_numbers(_check_number))
    return undo.close


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _is_sliced_copy(value: Any) -> bool:
    """Return True for a slice of a tensor of shards: gathered, so what it is given is lost."""
    whole = base(value) if isinstance(value, DTensor) else None
    return isinstance(whole, DTensor) and memory_of(whole.to_local()) != memory_of(value.to_local())


def _note_draw(active: Sequence[GuardedModels], kwargs: Mapping[str, Any]) -> None:
    """Say once that each data rank draws by its own stream. Passes have a note of their own."""
    for guarded in active:
        is_own = guarded.mesh.data.size > 1 and kwargs.get("generator") is None
        if is_own and not guarded.phase.in_passes:
            guarded.note_once(_DRAWN, place=call_site())


def _drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that draws like a shard, or into it, for the whole; keep this rank's part."""
    shard: DTensor = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))

    def whole_like(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device=value.to_local().device)

    whole_args, whole_kwargs = tree_map(whole_like, (tuple(args), dict(kwargs)))
    with torch.no_grad():
        drawn: Any = shard_like(func(*whole_args, **whole_kwargs), shard)
        if not func.__name__.endswith("_like"):
            shard.to_local().copy_(drawn.to_local())
            return shard
    return drawn.requires_grad_(bool(kwargs.get("requires_grad")))


def _copied(func: Callable[..., Any], shard: DTensor, memo: dict[int, Any]) -> Any:
    gradient, shard.grad = shard.grad, None
    try:
        return func(shard, memo)
    finally:
        shard.grad = gradient


def _fits(shard: Any, values: Tensor) -> bool:
    """Return True for values of a whole parameter, which its shards can take."""
    is_same = (shard.shape, shard.dtype) == (values.shape, values.dtype)
    return is_same and isinstance(shard, DTensor)


def _write_data(shard: DTensor, values: Tensor) -> None:
    """Copy this rank's part of the values into its shard."""
    with torch.no_grad():
        values = values.detach()
        part: Any = shard_like(values, shard)
        shard.to_local().copy_(part.redistribute(placements=shard.placements).to_local())


def _explained(name: str, error: Exception, active: Sequence[GuardedModels]) -> UsageError | None:
    """Return torch's error about shards in our words; None for another error.

    Args: name: of the function.
    """
    if any(words in str(error) for words in _UNREADABLE):
        return _unreadable(name, active)
    under = next((guarded.under for guarded in active), "")
    in_passes = any(guarded.phase.in_passes for guarded in active)
    cure = _IN_A_STEP.get(name, "")
    if not any(words in str(error) for words in _MIXED) or (cure and in_passes):
        return None  # of a layer in a step the strategy says more
    instead = (
        "Take whole values from run.weights() or run.gradients(), on all ranks, for an average of "
        "weights for example. For a loss, as a penalty on weights is, these have no gradient: use "
        f"ddp, where every rank holds whole parameters, or weight_decay.{cure}"
    )
    if in_passes:
        instead = (
            "Use ddp, where compute_loss has whole parameters. A penalty c * p.pow(2).sum() of all "
            "of them is also weight_decay=2 * c of SGD."
        )
    return UsageError(
        f"{name}{call_site()}{under}: each rank holds a part of a parameter or of its gradient, "
        f"and that part was combined with a whole tensor. {instead}"
    )


def _unreadable(name: str, active: Sequence[GuardedModels]) -> UsageError:
    under = next((guarded.under for guarded in active), "")
    return UsageError(
        f"{name.strip('_')}(){call_site()}{under}: each rank holds a part of this tensor. Take "
        "whole values from run.weights() or run.gradients(), on all ranks; changed ones go back by "
        "model.load_state_dict(weights). Or use ddp, where every rank holds whole parameters."
    )


def _check_number(tensor: DTensor) -> None:
    """Raise UsageError for a number of which this rank has a part."""
    if any(placement.is_partial() or placement.is_shard() for placement in tensor.placements):
        raise UsageError(
            f"item(){call_site()}: this rank has its part of this number only, that of its shards. "
            "Take it from whole tensors, on all ranks: those of run.weights() or run.gradients(), "
            "under every strategy. For the norm of all gradients there is "
            "run.clip_gradients(max_norm)."
        )


_shards = ProcessWidePatch(_install)
