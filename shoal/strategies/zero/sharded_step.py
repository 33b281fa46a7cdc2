"""One rank's steps through torch's `fully_shard`.

      forward    root opens │ compute_loss: units gather, compute, free │ root closes; loss + token
      backward   units gather again, compute, reduce │ the root's parameters are reduced and freed
      reduce     scalars; parameters that no rank has used lose their gradient

A gradient that is taken inside compute_loss (`torch.autograd.grad`) is a backward pass of its own
to the engine, which must neither reduce nor free anything before the forward pass has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from shoal.comm.axis import Axis
from shoal.comm.mesh import register_cleanup
from shoal.errors import StrategyRefused, UsageError
from shoal.platform.script_line import call_site
from shoal.platform.torch_private.pytree import tree_map
from shoal.platform.torch_private.tensor_state import is_view, version
from shoal.strategies.base import Forward, ForwardOutput, LocalBatch, LocalModel, StepResult
from shoal.strategies.former_modules import FormerModules
from shoal.strategies.local_step import mean_result, scaled_for_mean
from shoal.strategies.wrap_units import innermost, units, user_models
from shoal.strategies.zero.lockstep import Lockstep
from shoal.strategies.zero.step_root import StepRoot

FREED = ("out of bounds for storage of size 0", "data is not allocated yet")
"""Words of torch about a tensor whose memory the engine has freed."""


class ShardedStep:
    """One rank's steps through `fully_shard`.

    `fully_shard` takes no 0-dimensional parameters. These *scalars* are replicated. The optimizer
    steps a DTensor that shares the memory of the scalar, for it takes no mix of both kinds.

    Args:
        unit: class name of the units; empty for the rule of `wrap_units`.
        arguments: of `fully_shard`: mesh and policies. The constructor is collective.

    Attributes:
        totals_work: the asynchronous all-reduce of this step's totals; None on one rank.
        scalars: 0-dimensional trainable parameters, by name.
        replicated: their DTensors, by name, which the optimizer steps.
        lockstep: None on one rank.
        root: the module around the user's model, and the root module of `fully_shard`.
        engines: units and the root, as the engine knows them.
    """

    def __init__(
        self, stage: int, model: LocalModel, data: Axis, unit: str, arguments: dict[str, Any]
    ) -> None:
        self.stage = stage
        self.model = model
        self.data = data
        self.totals_work: dist.Work | None = None
        self.scalars = {name: p for name, p in model.trainable_params.items() if p.dim() == 0}
        self._former = FormerModules(model.module)
        # Units inside each other would run at the same time, and have no order.
        wrapped = innermost(units(model.module, unit))
        _check_one_dtype(model.module, wrapped.values())
        self.root = StepRoot(model.module, self.release)
        self.lockstep: Lockstep | None = None
        if data.size > 1:
            self.lockstep = Lockstep(data, self.root, model, wrapped, frees=stage == 3)
            register_cleanup(self.lockstep)
        self.root.lockstep = self.lockstep
        for parameter in model.module.parameters():
            if not parameter.is_contiguous():  # channels_last, which fully_shard does not take
                parameter.data = parameter.data.contiguous()
        # fully_shard divides dimension 0, which a scalar does not have: `_reduce_scalars`.
        ignored = {p for p in model.module.parameters() if p.dim() == 0}
        shard = partial(fully_shard, ignored_params=ignored, **arguments)
        for module in wrapped.values():
            module.register_forward_hook(_clone_views)
            self._fill([module])
            with self.lockstep.wrap_unit(module) if self.lockstep else nullcontext():
                shard(module, reshard_after_forward=stage == 3)
        self._fill([model.module])
        # What belongs to no unit is needed again as soon as the backward pass begins.
        shard(self.root, reshard_after_forward=False)
        self.engines = [m for m in self.root.modules() if isinstance(m, FSDPModule)]
        for engine in self.engines:
            type(engine).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        self.root.open_for_calls({*user_models(model.module), *wrapped.values()})
        # (parameter that the optimizer steps, parameter of the model that the loop sees instead).
        self._shown: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._former.note_changes()
        self._offloads = "offload_policy" in arguments
        self.replicated = {
            name: nn.Parameter(_replicated(scalar.detach(), arguments["mesh"]))
            for name, scalar in self.scalars.items()
        }
        model.renew_params(self.replicated)

    def _fill(self, modules: list[nn.Module]) -> None:
        """Give modules their weights, so that a rank has its shards and one unit. Collective."""
        if self.model.weights is not None:
            self.model.weights.fill(modules, self.data)

    @contextmanager
    def whole_models(self) -> Iterator[bool]:
        """Make whole what this strategy has sharded, then what others have divided. Collective.

        It is a context as `OutsideStep.whole_models`.
        """
        # Shards of a GPU lie on the CPU, where a model does not compute.
        if self._offloads and self.data.device.type != "cpu":
            yield False
            return
        with self._former.whole(self.data, is_bounded=self.stage == 3) as fits:
            inner = self.model.outside_step.whole_models
            with inner() if fits and inner is not None else nullcontext(fits) as is_whole:
                yield is_whole

    def hold(self, holds: bool) -> None:
        """Keep the forward pass of a loop open for its loss, or end it with each call."""
        self.root.begin_loss = self._configure if holds else None
        self.root.end_call = self._show_gradients if holds else None
        if not holds:
            self.root.end_held()

    def _show_gradients(self, name: str) -> None:
        """Give gathered parameters a gradient of zeros where their shards have a gradient: a loop
        may zero its gradients, or set them to None, between forward and backward pass.

        Args: name: of the module whose parameters are gathered now.
        """
        module = self.model.module.get_submodule(name)
        for path, gathered in module.named_parameters(prefix=name):
            shard = self.model.trainable_params.get(path, gathered)
            if shard is gathered or shard.grad is None:
                continue
            if gathered.dim() and gathered.grad is None:
                gathered.grad = gathered.new_zeros(()).expand_as(gathered)
                self._shown.append((shard, gathered))

    def settle_gradients(self) -> None:
        """Set a shard's gradient to None or zero where the loop did so to the gathered one."""
        for shard, shown in self._shown:
            if shown.grad is None:
                shard.grad = None
            elif shown.dim() and version(shown.grad) and shard.grad is not None:
                shard.grad.zero_()
            shown.grad = None
        self._shown = []

    def forward(self, batch: LocalBatch) -> ForwardOutput:
        """Compute a micro-batch and its loss. The last one starts the sum of the totals."""
        self._configure()
        output = self.root.run(batch.step.compute_loss, partial(self.model.forward, batch))
        reduces = batch.is_last_microbatch or self.stage > 1
        frees = batch.is_last_microbatch or self.stage == 3
        self._configure(reduces, frees, is_last=True)
        if self.lockstep is not None:
            self.lockstep.reduces = reduces
            self.lockstep.frees_after_backward = frees
            output = output._replace(loss=self.lockstep.attach_token(output.loss))
        if batch.is_last_microbatch and self.data.size > 1:
            # On its way during the backward pass: nothing before `run`'s end reads it.
            self.totals_work = dist.all_reduce(
                output.step_totals, group=self.data.group, async_op=True
            )
        return output

    def _configure(self, reduces: bool = False, frees: bool = False, is_last: bool = False) -> None:
        """Choose what the engine does in the backward passes that come now.

        One inside the forward pass (`torch.autograd.grad`) reduces no gradient and frees nothing.

        Args: is_last: no further backward pass comes before the next forward pass.
        """
        # `engines` has every unit, so each call is for one module alone.
        for engine in self.engines:
            engine.set_requires_gradient_sync(reduces, recurse=False)
            engine.set_reshard_after_backward(frees, recurse=False)
        assert isinstance(self.root, FSDPModule)
        self.root.set_is_last_backward(is_last)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that computes with the model, as `LocalModel.call`. Collective."""
        if torch.is_grad_enabled():  # gradients inside of it are inner ones
            self._configure()
        with self._explain_sharded_weights():
            return self.root.run(
                function, partial(self.model.outside_step.call, function, *args, **kwargs)
            )

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute both passes of one micro-batch. Collective.

        The engine reduces gradients to means over ranks. `scaled_for_mean` turns them into sums.
        """
        with self.root.step(), self._explain_sharded_weights():
            result = self.model.run(forward, scaled_for_mean(batch, self.data.size))
        if not batch.is_last_microbatch:
            return result
        if self.totals_work is not None:
            self.totals_work.wait()
        return mean_result(result, result.step_totals, self.data.size)

    @contextmanager
    def _explain_sharded_weights(self) -> Iterator[None]:
        """Replace torch's error about a weight that is sharded when it is used, by the cures."""
        try:
            yield
        except RuntimeError as error:
            if "not have been used in the graph" in str(error):
                raise StrategyRefused(
                    f"zero{self.stage}: compute_loss takes a gradient by parameters "
                    "(torch.autograd.grad), and between its units a rank holds shards of them. "
                    "Use zero1 or ddp. Gradients by inputs are taken."
                ) from error
            if any(words in str(error) for words in FREED):
                raise StrategyRefused(
                    f"zero{self.stage}: a part of this loss was computed before the last step, and "
                    "the weights that its graph needs were freed with that step. Compute it again "
                    "for this loss, fake = generator(z); or use ddp."
                ) from error
            if "DTensor" not in str(error):
                raise
            freed = (
                "it is gathered while that unit runs"
                if self.stage == 3
                else "it is gathered when that unit runs"
            )
            later = " zero2, where it is used after the unit has run;" if self.stage == 3 else ""
            raise StrategyRefused(
                f"zero{self.stage}: a weight of one unit is used outside of that unit, and "
                f"{freed}. Cures:{later} "
                "unit=CLASS with a class that holds both; assign the weight to the module that "
                "uses it as well, self.name = unit.weight, so that it counts as tied; ddp."
            ) from error

    def reduce(self) -> None:
        """Average the gradients of scalars, and remove unused ones. Collective.

        The engine has averaged all others. A parameter that no rank has used gets `.grad = None`.
        """
        self.model.reduce_gradients()
        lacking = {name for name, scalar in self.scalars.items() if scalar.grad is None}
        unused = lacking if self.lockstep is None else set(self.lockstep.unused(lacking))
        used = {name: scalar for name, scalar in self.scalars.items() if name not in unused}
        if used:
            self._reduce_scalars(used)
        for name in unused - self.scalars.keys():
            self.model.trainable_params[name].grad = None

    def _reduce_scalars(self, used: dict[str, nn.Parameter]) -> None:
        """Average the gradients of scalars in one message. Collective.

        Every rank sends a value for each, 0 if it did not use the scalar.
        """
        gradients = [torch.zeros_like(s) if s.grad is None else s.grad for s in used.values()]
        self.model.finite_check.look(dict(zip(used, gradients, strict=True)))
        dtype = max((gradient.dtype for gradient in gradients), key=lambda kind: kind.itemsize)
        means = self.data.all_reduce(
            torch.stack([gradient.to(dtype) for gradient in gradients])
        ).div_(self.data.size)
        for (name, scalar), mean in zip(used.items(), means.unbind(), strict=True):
            stepped = self.replicated[name]
            assert isinstance(stepped, DTensor)
            scalar.grad = mean.to(scalar.dtype)
            stepped.grad = _replicated(scalar.grad, stepped.device_mesh)
            self._shown.append((stepped, scalar))

    def release(self) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered."""
        self.model.outside_step.reshard()
        for engine in self.engines:
            engine.reshard()


def _check_one_dtype(model: nn.Module, wrapped: Iterable[nn.Module]) -> None:
    """Raise StrategyRefused if the parameters of a unit, or those in no unit, differ in dtype.

    The engine gathers all of them in one message.
    """
    units_of = {p: unit for unit in wrapped for p in unit.parameters()}
    first: dict[nn.Module | None, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim():
            other, one = first.setdefault(units_of.get(parameter), (name, parameter))
            if one.dtype != parameter.dtype:
                raise StrategyRefused(
                    f"zero: {other} ({one.dtype}) and {name} ({parameter.dtype}) are gathered in "
                    "one message, which has one dtype. Use one for all parameters, "
                    'model.float(), with shoal.init(precision="bf16") to compute in bfloat16; '
                    "or ddp."
                )


def _clone_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Forward hook: clone outputs that are views.

    The engine gathers a unit again by a node on its outputs. Writing into a view would replace that
    node.
    """
    return tree_map(
        lambda item: item.clone() if isinstance(item, Tensor) and is_view(item) else item, output
    )


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _refuse_copy(*_: Any) -> NoReturn:
    """Raise UsageError, where torch's class says nothing of a cure."""
    raise UsageError(
        f"copy.deepcopy{call_site()}: a model that zero has divided has no copy; each rank holds "
        "shards of it. For a moving average call run.ema(decay) in place of AveragedModel; keep "
        "weights by weights = run.weights(), on all ranks, which model.load_state_dict(weights) "
        "takes back; or copy the model before run.prepare."
    )
