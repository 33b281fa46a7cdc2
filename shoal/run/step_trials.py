"""The trial of a loss: is it a mean over samples?

first step     the loss is tried on parts of the batch, in the first step of a run before a strategy
               has divided the models. Ranks tell one another what they have found, and all raise
later steps    a batch with news, such as a first padded sample, is tried by the rank that has it;
               where models are divided, by all ranks in steps 2, 4, 8, ...; in a pipeline, which
               has no rank with all layers, a note tells of padding. In steps 16, 256, 4096, ... all
               losses are tried again: one may bend when it has become small, as flooding does
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from shoal.comm.row_collectives import gather_rows
from shoal.comm.tensor_digest import tensor_digest
from shoal.data.tree_map import are_tensors
from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.platform.torch_private.tensor_state import version
from shoal.run.optimizer_binding import listed
from shoal.run.prepared import Prepared
from shoal.run.step import code_of
from shoal.strategies.base import ComputeLoss, LocalBatch, LocalModel
from shoal.strategies.former_modules import MOST_BYTES
from shoal.trial import LossKind, LossVerdict, judged_in_child, try_loss
from shoal.trial.batch_rows import BatchNews
from shoal.trial.called_models import ModelCall, calls_behind, try_calls
from shoal.trial.loss_graph import UNPREPARED
from shoal.trial.loss_verdict import percent
from shoal.trial.reached import Place, reached_numbers, tensors_of
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress
from shoal.weights.deferred_init import DeferredWeights, empty_bytes

PADDING = (
    "note: labels below 0 have come, and there were none when the loss was tried. Where a loss "
    "leaves them out of its mean, micro-batches weigh wrongly: return shoal.counted(sum, count)."
)
MIXES = (
    "run.backward was given a loss of outputs that a model has computed from several samples of "
    "this rank together, as a norm over the batch, an observer of activations or a balance of "
    "experts does: on some of its {rows} samples it gives outputs whose gradients differ by "
    "{difference} from those on all. One device takes the samples of all ranks. Compute what mixes "
    "them from run.gather(tensor). Or, to train the mean of the ranks' means, say so: "
    'run.backward(loss, reduction="ranks").'
)
WRITTEN = (
    "note: ranks differ in {names}, and did not before the first step. What compute_loss or the "
    "loop writes there is of one rank's samples, and so is what is printed or decided by it. "
    'shoal.all_reduce(value, op="sum") gives that of all ranks.'
)
CALLED_OFTEN = (
    "note: compute_loss, or a model, changes {names}. It runs once for each micro-batch, and in a "
    "pipeline also to divide the models, so that a count of its calls is none of steps. Count "
    "steps in the loop."
)
HANDED_ON = (
    "note: compute_loss, or a model, keeps {names} from call to call, and runs once for each "
    "micro-batch of a step. Where it reads them again, such as a hidden state, one device hands "
    "them from batch to batch: use accumulate=1 and no pipeline."
)
ROWS_OF_NO_SAMPLE = "a tensor of its batches has other rows than samples"
DIVIDED = "no rank has the whole models, and they are not put together for it"


class StepTrials:
    """Tries each loss of a run in its first step.

    Attributes:
        tried: steps of each function that was tried, by its `_key`.
        in_first_step: the passes of a function's first step have not ended.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.tried = Counter[object]()
        self._news = BatchNews()
        self._has_news = False
        self._own_numbers: dict[str, Place] = {}
        self._first_digests: dict[object, dict[str, str]] = {}
        self._first_tensors: dict[object, list[ReferenceType[Tensor]]] = {}
        self._noted: set[LossKind] = set()
        self._tried_models: set[nn.Module] = set()
        self.in_first_step = False
        # Tensors that the function of a first step may train, with versions of their gradients.
        self._unprepared: list[tuple[Tensor, Any]] = []
        # The batch of a first step whose passes call its function several times, and what the
        # numbers of the function and of the models were before them.
        self._before_passes: tuple[LocalBatch, dict[str, Any], dict[str, Any]] | None = None

    def has_tried(self, function: ComputeLoss) -> bool:
        """Return True if a function was tried with the models that are prepared now."""
        return self._key(function) in self.tried

    def _key(self, function: ComputeLoss) -> tuple[object, int]:
        return code_of(function), len(self._prepared.models)

    def first_step(self, batch: LocalBatch) -> None:
        """Try the loss of a batch. Collective.

        Raises: UsageError: on all ranks, if one objects and a batch is computed in parts.
        """
        mesh, sizes = self._prepared.mesh, self._prepared.sizes
        if not self.tried:
            sizes.check_shared()
            if not batch.step.sizes_known:
                sizes.note_same_rows([batch.args, batch.kwargs], self._prepared.announce)
        code = self._key(batch.step.compute_loss)
        self.tried[code] = 1
        self.in_first_step = True
        if mesh.data.size > 1:
            self._first_digests[code] = _digests(self._reached(batch))
            tensors = tensors_of(batch.step.compute_loss)
            self._first_tensors[code] = [ref(t) for t in tensors]
            self._unprepared = [(t, _grad_version(t)) for t in self._not_prepared(tensors)]
        self._look_at(batch)
        self._tell(self._try(batch))
        if self._prepared.settings.accumulate > 1 or mesh.pipeline.size > 1:
            self._before_passes = batch, *self._held(batch)

    def after_passes(self) -> None:
        """Note what a first step has given a gradient that no rank averages, and what was counted
        where a step calls its function several times. Collective over the stages of a pipeline.
        """
        self.in_first_step = False
        unprepared, self._unprepared = self._unprepared, []
        for tensor, before in unprepared:
            if _grad_version(tensor) != before:
                self._prepared.note_once(UNPREPARED, shape=tuple(tensor.shape))
        if self._before_passes is None:
            return
        (batch, numbers_before, kept_before), self._before_passes = self._before_passes, None
        numbers, tensors = self._held(batch)
        ranks = self._prepared.mesh.tensor.size  # a pipeline's stages divide their heads meanwhile
        own = [
            name
            for name, number in numbers.items()
            if repr(numbers_before.get(name, number)) not in (repr(number), repr(ranks * number))
        ]
        kept = [name for name, digest in tensors.items() if kept_before.get(name) != digest]
        stages = self._prepared.mesh.pipeline.all_gather_json([own, kept])
        for note, each in zip((CALLED_OFTEN, HANDED_ON), zip(*stages, strict=True), strict=True):
            if names := [*dict.fromkeys(name for stage in each for name in stage)]:
                self._prepared.note_once(note, names=listed(names, 3))

    def _not_prepared(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those that may get a gradient and are parameters of no prepared model."""
        prepared = {id(p) for model in self._prepared.models for p in model.parameters()}
        leaves = (t for t in tensors if t.requires_grad and t.is_leaf)
        return [t for t in leaves if id(t) not in prepared]

    def _look_at(self, batch: LocalBatch) -> bool:
        arguments = dict(enumerate([*batch.args, *batch.kwargs.values()]))
        return self._news.found_in(arguments, batch.num_samples)

    def later_step(self, batch: LocalBatch) -> None:
        """Try a loss again if the batch has news. Collective where models are divided.

        A loss that fails on parts of a batch is left alone: a run does not end in its middle.

        Raises: UsageError: the loss is no mean over samples.
        """
        prepared = self._prepared
        if not self._has_parts:
            return
        code = self._key(batch.step.compute_loss)
        self.tried[code] += 1
        step = self.tried[code]
        is_power = step & (step - 1) == 0
        self._has_news |= self._look_at(batch)
        is_tried_again = is_power and step.bit_length() % 4 == 1  # 16, 256, 4096, ...
        written: list[str] = []
        if is_power:  # the script may have changed its numbers
            own = self._numbers_of_ranks(batch)
            self._own_numbers = {name: number for name, number in own.items() if number.is_real}
            first = self._first_digests.get(code, {})
            written = [name for name, n in own.items() if first.get(name) != n.digest()]
        self._has_news |= is_tried_again or bool(self._own_numbers)
        read: Sequence[str] = ()
        if not is_divided(prepared.local_model()):
            if self._has_news and batch.num_samples > 1:
                self._has_news = False
                with prepared.guards.phase:
                    verdict = self._judged(batch, batch.num_samples)
                if verdict.ends_a_run:
                    raise UsageError(verdict.text())
                if verdict.computes_with_own_values:
                    self._note(verdict)
                read = verdict.own_numbers
        elif is_power:
            read = self._try_together(batch)
        if written := [name for name in written if name not in read]:
            prepared.note_once(WRITTEN, names=listed(written, 3))

    def _numbers_of_ranks(self, batch: LocalBatch) -> dict[str, Place]:
        """Return the numbers of the script that the loss reaches and that differ on data ranks.

        Collective.
        """
        data = self._prepared.mesh.data
        if data.size == 1 or not self._prepared.local_model().strategy_state.is_synchronous:
            return {}
        numbers = self._reached(batch)
        own = _digests(numbers)
        others = data.all_gather_json(own)
        # A tensor may have as many rows as the samples of some rank, which leaves it out.
        return {n: numbers[n] for n in own if any(o.get(n, own[n]) != own[n] for o in others)}

    def _held(self, batch: LocalBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the numbers with which the loss or a model here may count its calls, and digests
        of the tensors that it may keep, by name.
        """
        numbers: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for name, place in self._reached(batch).items():
            (kept if isinstance(place.value, Tensor) else numbers)[name] = place.digest()
        modules = [pair for model in self._prepared.models for pair in model.named_modules()]
        for path, module in modules:
            if isinstance(module, BatchNormBase):
                continue  # has a note of its own
            buffers = dict(module.named_buffers(recurse=False))
            for key, value in {**vars(module), **buffers}.items():
                name = f"{path}.{key}".removeprefix(".")
                if type(value) in (int, float):
                    numbers[name] = value
                elif isinstance(value, Tensor) and not value.is_floating_point():
                    if value.numel() == 1:
                        numbers[name] = repr(value)
                elif type(value) is Tensor and key not in buffers and _has_plain_memory(value):
                    kept[name] = int(tensor_digest(value.detach()))
        return numbers, kept

    def _reached(self, batch: LocalBatch) -> dict[str, Place]:
        """Return the numbers of the script that the loss reaches, without those of its batch."""
        function = batch.step.compute_loss
        tensors = [tensor() for tensor in self._first_tensors.get(self._key(function), ())]
        older = {id(tensor) for tensor in tensors if tensor is not None}
        return reached_numbers(function, self._prepared.models, batch.num_samples, older)

    def called_models(self, calls: Sequence[ModelCall], batch: LocalBatch) -> None:
        """Try models that a loop has called for a loss, each the first time. Collective.

        Raises: UsageError: on all ranks, if one computes a sample's output from other samples.
        """
        prepared = self._prepared
        if not (self._has_parts and batch.step.sizes_known):
            return
        behind = calls_behind(batch.step.compute_loss(), calls)
        new = [call for call in behind if call.model not in self._tried_models]
        self._tried_models.update(call.model for call in new)
        mesh, text, rows = prepared.mesh, "", batch.num_samples
        if not mesh.on_any_rank(bool(new)):
            return
        with self._prepared.guards.phase, self._whole_models() as are_whole:
            if are_whole and rows > 1:
                verdict = self._in_child(lambda: try_calls(new, rows, prepared.models))
                if verdict.objects:
                    text = MIXES.format(rows=rows, difference=percent(verdict.difference))
        for objection in mesh.all_gather_str(text):
            if objection:
                raise UsageError(objection)

    def _try_together(self, batch: LocalBatch) -> Sequence[str]:
        """Try a loss again if the batch of any rank has had news since the last time. Collective.

        Returns: names of the numbers that differ on ranks and that the loss reads.

        Raises: UsageError: on all ranks.
        """
        mesh = self._prepared.mesh
        is_pipeline = mesh.pipeline.size > 1
        wants = self._news.has_padding if is_pipeline else self._has_news
        if not mesh.on_any_rank(wants):
            return ()
        self._has_news = False
        if not is_pipeline:
            verdict = self._try(batch)
            is_told = verdict.ends_a_run or verdict.computes_with_own_values
            self._tell(verdict if is_told else LossVerdict(LossKind.MEAN))
            return verdict.own_numbers
        self._prepared.note_once(PADDING)
        return ()

    @property
    def _has_parts(self) -> bool:
        """True if a global batch is computed in parts, on ranks or as micro-batches."""
        mesh, accumulate = self._prepared.mesh, self._prepared.settings.accumulate
        return mesh.data.size * accumulate > 1 or mesh.pipeline.size > 1

    def _try(self, batch: LocalBatch) -> LossVerdict:
        """Try the loss where this rank has the whole models, or can have them. Collective."""
        with self._prepared.guards.phase, self._whole_models() as are_whole:
            joined = self._with_rows_of_all_ranks(batch)
            if not are_whole:
                return LossVerdict(LossKind.NOT_JUDGED, reason=DIVIDED)
            return self._judged(joined, batch.num_samples)

    def _judged(self, batch: LocalBatch, rows: int) -> LossVerdict:
        """Judge the loss by running the models, which must be whole on this rank.

        Args: rows: of the batch, this rank's own.
        """
        if self._news.has_other_rows:  # perhaps as many as samples, by chance
            return LossVerdict(LossKind.NOT_JUDGED, reason=ROWS_OF_NO_SAMPLE)
        models, settings = self._prepared.models, self._prepared.settings
        drawn_sizes: list[int] = []
        in_parts = settings.accumulate > 1 or self._prepared.mesh.pipeline.size > 1
        if settings.draws == "global" and self._has_parts:
            parts = settings.accumulate
            drawn_sizes = sorted({max(rows // parts, 1), max(-(-rows // parts), 1)})
        given = batch.step.compute_loss, batch.args, batch.kwargs, batch.num_samples
        own_numbers, self._own_numbers = self._own_numbers, {}

        def judge() -> LossVerdict:
            # In a child, which keeps this rank's as they are.
            DeferredWeights(self._prepared.mesh.device).fill(models, keeps=True)
            return try_loss(*given, models, drawn_sizes, own_numbers, in_parts)

        return self._in_child(judge)

    def _in_child(self, judge: Callable[[], LossVerdict]) -> LossVerdict:
        # Under servers a pass waits for values that a thread receives, which no child has.
        is_remote = self._prepared.local_model().remote_optimizer is not None
        with own_progress().during(Phase.FORWARD):
            return judge() if is_remote else judged_in_child(judge)

    def _tell(self, verdict: LossVerdict) -> None:
        """Raise an objection of any rank, or note what this one has found. Collective."""
        mesh = self._prepared.mesh
        own = verdict.text() if verdict.objects else ""
        told = mesh.all_gather_json([own, self._news.has_other_rows])
        objections = [own, *(text for text, _ in told)]
        if any(has_other_rows for _, has_other_rows in told):
            verdict = LossVerdict(LossKind.NOT_JUDGED, reason=ROWS_OF_NO_SAMPLE)
        elif any(objections) and self._has_parts:
            raise UsageError(next(text for text in objections if text))
        self._note(verdict)

    def _note(self, verdict: LossVerdict) -> None:
        if verdict.is_worth_a_note and verdict.kind not in self._noted:
            self._noted.add(verdict.kind)
            refused = "on more than one rank, or in micro-batches, this loss will be refused: "
            self._prepared.announce(f"note: {refused if verdict.objects else ''}{verdict.text()}")

    def _with_rows_of_all_ranks(self, batch: LocalBatch) -> LocalBatch:
        """Return the samples of all data ranks as one batch, if a rank has fewer than two of its
        own and so nothing to compare; else the batch itself. Collective.
        """
        data, rows = self._prepared.mesh.data, batch.num_samples
        is_synchronous = self._prepared.local_model().strategy_state.is_synchronous
        if data.size == 1 or not is_synchronous:
            return batch
        tensors = [*batch.args, *batch.kwargs.values()]
        can_join = are_tensors(tensors) and all(
            _has_plain_memory(t) and t.shape[:1] in ((rows,), (1,)) for t in tensors
        )
        few, cannot, total = data.sum_of_host_numbers([rows < 2, not can_join, rows])
        if not few or cannot or total < 2:
            return batch
        if not data.is_same([(tensor.dtype, tensor.shape[1:]) for tensor in tensors]):
            return batch  # ranks have padded their rows to lengths of their own

        def joined(tensor: Tensor) -> Tensor:
            # A rank without samples stands in with a copy of another one's.
            return gather_rows(tensor.detach()[:rows], data)

        args = tuple(map(joined, batch.args))
        kwargs = {name: joined(tensor) for name, tensor in batch.kwargs.items()}
        return batch._replace(args=args, kwargs=kwargs, num_samples=int(total))

    def _whole_models(self) -> AbstractContextManager[bool]:
        """Return a context that yields True if this rank can run the models alone in it.

        Collective.
        """
        model = self._prepared.local_model()
        if model.outside_step.whole_models is not None:
            return model.outside_step.whole_models()
        fits = empty_bytes(self._prepared.root) <= MOST_BYTES  # a trial would fill all of them
        return nullcontext(fits and not is_divided(model))


def is_divided(model: LocalModel) -> bool:
    """Return True if this rank alone cannot run the models."""
    if model.is_divided:
        return True
    # A trial evaluates layers of batch statistics, which then need no other rank; those that have
    # no running statistics do.
    return model.pass_traits.collective_forward and any(
        isinstance(module, BatchNormBase) and module.running_mean is None
        for module in model.module.modules()
    )


def _has_plain_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _grad_version(tensor: Tensor) -> tuple[int, int] | None:
    """Return what is another value when a backward pass has added to the gradient."""
    return None if tensor.grad is None else (id(tensor.grad), version(tensor.grad))


def _digests(numbers: dict[str, Place]) -> dict[str, str]:
    return {name: number.digest() for name, number in numbers.items()}
