"""Sizes of a batch: its samples on this rank and on all ranks, by which its loss is weighted.

The loader remembers which tensors it has yielded with which share. A batch that was made from those
tensors, for example by `x.cuda()`, is unknown to it and is taken for the last share. Its shape must
fit that share. Shares may differ in size, as the last one of an epoch does: then samples must lie
in the tensors as they did in earlier batches.

Shares of one global batch lie at the same place of an epoch on all ranks. A rank that leaves out a
batch, by a number of its own, computes on the share of another one from then on, and no collective
tells: `BatchHistory` does. So it does where samplers draw other samples on each rank.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.tensor_digest import as_bytes
from shoal.data.batch_shards import BatchRegistry, BatchShard, share_batch
from shoal.data.fingerprint import fingerprint
from shoal.data.sharded_loader import ShardedLoader, YieldWatch
from shoal.data.tree_map import are_tensors, row_tensors, rows_of, tensors_in
from shoal.errors import UsageError
from shoal.run.collective_calls import CURE

Layouts = set[tuple[int, int]]
"""Possible layouts of samples in a tensor, each (dim, entries of that dim for one sample)."""
ONE_ROW_PER_SAMPLE: Layouts = {(0, 1)}
OTHER_ROWS = (
    "note: the batch of the first step is no whole one of a prepared loader or of run.share, and "
    "the ranks have different rows: those of all {ranks} ranks count as one batch. Where each "
    "rank draws a batch of the size that one device would, that is {ranks} times as many samples "
    "a step: use loader = run.prepare(loader), or run.share(batch) of a batch that is the same on "
    "all ranks."
)
"""Note about batches that each rank has made by itself."""
PART = (
    "note: the first loss is of {rows} samples, and this rank has {share} of the batch. A loop "
    "that cuts micro-batches itself cuts fewer on each rank than on one device, so a sum over them "
    "is smaller: shoal.init(accumulate=N), and for micro in run.microbatches(batch)."
)
"""Note about a part of a batch."""
SAME_ROWS = (
    "note: all ranks were given the same rows in the first step, so each computes the whole batch: "
    "the numbers of one device, in its time. Divide it: run.share(batch), or run.prepare(loader)."
)
"""Note about batches that nobody has divided among the ranks."""

ORDER_CURE = (
    "Each rank takes its rows of the order that its own sampler draws, so some samples come twice "
    "and others never. A sampler must draw the same on all ranks: by torch, np.random or random, "
    "whose generators are seeded for each epoch, or by one that it seeds itself. Weights that "
    "follow from losses must be those of all samples: sampler.weights[run.gather(index)] = "
    "run.gather(losses.detach())."
)
"""Cure where samplers of ranks differ."""

OTHER_DATA = (
    "note: the data set is no longer the same on all ranks, noticed in epoch {epoch}. Where the "
    "script writes to it what a rank has computed from its own samples, such as new labels, other "
    "ranks read old values, and one device would read the new ones. Write what all ranks have: "
    "data.targets[run.gather(index)] = run.gather(labels). A cache of samples does no harm."
)
"""Note about a data set that ranks have changed in different ways."""

SHARED = "run.share was given a batch that is not the same on all ranks"
SHARED_CURE = (
    "Of one global batch it gives each rank its rows, so some samples would come twice, and others "
    "never. After run.prepare, torch draws other numbers on each data rank. Draw what chooses "
    "samples with a generator of its own, the same on all ranks: torch.randperm(n, "
    "generator=torch.Generator().manual_seed(epoch)), and by priorities that follow from the "
    "losses of all samples: priority[run.gather(index)] = run.gather(losses.detach()). Draw noise "
    "after run.share, and leave a loop on all ranks or on none."
)


class StepSizes(NamedTuple):
    """Samples of a batch.

    Attributes:
        rows: on this rank; 0 for a stand-in sample.
        global_rows: on all ranks and in all micro-batches; the same on every rank.
        is_known: False if `global_rows` stands for a number that no rank knows.
    """

    rows: int
    global_rows: int
    is_known: bool


class BatchSizes:
    """Finds the sizes of each batch of a run.

    Args:
        loaders: yield this rank's shares; the list may grow. Empty if the user makes the batches.
        data: the ranks that have shares of one global batch.
        watch: is told of batches that are shared.
        history: of the batches of steps.
    """

    def __init__(
        self, loaders: Sequence[ShardedLoader], data: Axis, watch: YieldWatch, history: BatchHistory
    ) -> None:
        self._loaders = loaders
        self._data = data
        self._history = history
        self._watch = watch
        self._shared = BatchRegistry()
        self._is_shared_checked = False
        # For batches of n tensors: the layouts of each tensor that all batches so far allow.
        self._layouts: dict[int, list[Layouts]] = {}
        # The last batch that `_learn_layout` has seen: (yielded by the loader, samples, shapes).
        self._last_learned: tuple[bool, int, list[torch.Size]] | None = None

    def share(self, batch: Any) -> Any:
        """Return this rank's rows of a global batch that is the same on all ranks.

        `resolve` knows them. A rank without rows gets a stand-in of weight 0.

        Raises: UsageError: the number of samples cannot be told.
        """
        if self._data.size > 1:
            self._history.add_shared(batch)
        local, share = share_batch(batch, self._data.rank, self._data.size)
        self._shared.remember(local, share)
        self._watch.begin(local, share)
        return local

    def check_shared(self) -> None:
        """Compare the batches that ranks have given to `share` so far. Collective if there are any.

        Only the first call compares; later batches are compared as those of loaders are.

        Ranks of the data axis draw numbers of their own in the loop, so a permutation that is
        drawn there differs: rows of one rank may then be rows of another rank's batch too.

        Raises: UsageError: on every rank, if the batches differ.
        """
        if self._is_shared_checked or self._data.size == 1 or self._shared.last is None:
            return
        self._is_shared_checked = True
        if not self._data.is_same(self._history.shared_digest):
            raise UsageError(f"{SHARED}. {SHARED_CURE}")

    def note_same_rows(
        self, batch: Any, announce: Callable[[str], None], rows: int = 0, share: int = 0
    ) -> None:
        """Announce whether all ranks compute one and the same batch or others. Collective.

        Args:
            batch: the first of a run, a nest of tensors that no loader and no `share` has made.
            rows: samples in it.
            share: samples of the batch that a loader has yielded last; 0 if none has.
        """
        if self._data.size == 1:
            return
        digest = hashlib.sha256()
        has_tensors = _add_to(digest, batch)
        is_same = self._data.is_same(digest.digest())
        if has_tensors:  # else nothing was compared
            other = PART if rows < share else OTHER_ROWS
            facts = {"ranks": self._data.size, "rows": rows, "share": share}
            announce(SAME_ROWS if is_same else other.format(**facts))

    def track(self, tensor: Tensor, moved: Tensor) -> None:
        """Record that `moved` is `tensor` on another device."""
        for yielded in self._yielding:
            yielded.track(tensor, moved)

    def hold_samples(self, length: int) -> bool | None:
        """Return True if unclear lists hold samples, by the loader that was the last to yield.

        False if they hold columns, None if nothing tells.

        Args: length: of the lists.
        """
        yielding = [loader for loader in self._loaders if loader.share is not None]
        return yielding[-1].holds_samples(length) if yielding else None

    def resolve(self, arguments: Sequence[Any], rows: int | None) -> StepSizes:
        """Return the samples of a batch on this rank and on all ranks.

        Args:
            arguments: of `compute_loss`: nests of tensors.
            rows: as the user has said it; None to find out.

        Raises:
            UsageError: no loader has yielded such a batch, or the batch has tensors of several
                shares of different sizes.
        """
        for loader in self._loaders:
            loader.has_stepped = True
        if rows is None:
            if yielding := self._yielding:
                share = self._share_of(arguments, yielding)
                tensors = arguments if are_tensors(arguments) else tensors_in(arguments)
                shards = (x.yielded.shard_of(t) for t in tensors for x in self._loaders)
                found = next((shard for shard in shards if shard is not None), None)
                self._history.add(found)
                self._history.loaders = self._loaders
                self._count_step(is_known=found is not None)
                return StepSizes(share.rows, share.global_rows, is_known=True)
            rows = _length(arguments)
        # The sizes on other ranks are unknown. The loss becomes a sum with a count, and the counts
        # of all ranks are summed with the gradients. Until these are divided by the counts any
        # number would do, if it is the same on all ranks.
        return StepSizes(rows, self._data.size, is_known=False)

    def _count_step(self, is_known: bool) -> None:
        """Note a step whose batch is of no prepared loader, though loops over some have ended.

        Args: is_known: a prepared loader has yielded a tensor of the batch.
        """
        if self._data.size == 1 or self._shared.last is not None:
            return
        begun = [loader for loader in self._loaders if loader.share is not None]
        if not is_known and all(loader.is_over for loader in begun):
            begun[-1].note_other_batch()
        for loader in [loader for loader in begun if loader.pending][:1]:
            loader.pending -= 1

    def check_weights(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Raise UsageError if a loss of these inputs of models has no weight among the ranks.

        Batches of 8 and 4 samples have one: two ranks have half of both.
        """
        yielding = self._yielding
        if len(calls) < 2 or not yielding or _have_one_size(yielding):
            return
        # A loop may copy a batch into a tensor of its own, which is known by its length.
        last = {yielded.last.rows: yielded.last for yielded in yielding if yielded.last is not None}
        lengths = {len(tensor) for inputs in calls for tensor in _with_dims(tensors_in(inputs))[:1]}
        shares = _shares_of(calls, yielding) or [last[n] for n in sorted(lengths & last.keys())]
        if len({share.rows / share.global_rows for share in shares}) > 1:
            sizes = " and ".join(f"{share.rows} of {share.global_rows}" for share in shares)
            raise UsageError(
                f"run.backward: the models were called with batches of which this rank has {sizes} "
                "samples, so its loss has one weight for each. Two calls before optimizer.step() "
                "add up their gradients: run.backward(loss_of_one), before the models are called "
                "with the other, then run.backward(loss_of_other). Or take batch sizes that the "
                "ranks divide evenly, and drop_last=True. Calls that train nothing go under "
                "torch.no_grad()."
            )

    def are_known(self, inputs: Sequence[Any]) -> bool:
        """Return True if a loader or `share` has made one of these tensors."""
        return bool(_shares_of(inputs, self._yielding))

    def full_batch_rows(self) -> int:
        """Return the samples of a full global batch of the loaders in use; 0 if none is known.

        The first batch of a resumed run may be the short one at the end of an epoch.
        """
        rows = [
            min(loader.batch_size or 0, len(loader.dataset))
            for loader in self._loaders
            if loader.share is not None and isinstance(loader.dataset, Sized)  # as no stream is
        ]
        return max(rows, default=0)

    @property
    def _yielding(self) -> list[BatchRegistry]:
        sources = [*(loader.yielded for loader in self._loaders), self._shared]
        return [yielded for yielded in sources if yielded.last is not None]

    def _share_of(self, arguments: Sequence[Any], sources: Sequence[BatchRegistry]) -> BatchShard:
        """Return the share of these tensors: the one they were yielded with, or else the last.

        Args: sources: those that have yielded batches.
        """
        last = sources[-1].last
        assert last is not None
        share, is_certain = last, True
        # If all shares so far have one size, the tensors need not be looked up.
        if not _have_one_size(sources):
            known = _shares_of(arguments, sources)
            if len(known) > 1:
                sizes = " and ".join(str(share.rows) for share in known)
                raise UsageError(
                    f"forward_backward was given tensors of batches of {sizes} samples at once. "
                    "Give it one. Two calls before optimizer.step() add up their gradients: "
                    "run.forward_backward(loss_of_one, *one), then run.forward_backward("
                    "loss_of_other, *other). Servers take one call for a step: use ddp there."
                )
            share, is_certain = (known[0], True) if known else (last, False)
        # A share without samples has one stand-in sample. Lists with an entry for each sample are
        # sure to fit.
        # The arguments themselves are no list of samples, though there may be as many.
        in_rows = arguments
        if not are_tensors(arguments):
            in_rows = [*row_tensors(dict(enumerate(arguments)), share.rows)]
        to_learn = is_certain, share.rows, [tensor.shape for tensor in in_rows]
        if to_learn != self._last_learned:  # nearly every batch is like the one before
            self._learn_layout(_with_dims(in_rows), max(share.rows, 1), is_certain)
            self._last_learned = to_learn
        return share

    def _learn_layout(self, tensors: list[Tensor], num_samples: int, is_certain: bool) -> None:
        """Remember the layouts that fit this batch and the batches before it.

        Args: is_certain: the batch cannot have another number of samples.

        Raises: UsageError: so many samples cannot lie in these tensors, or lay otherwise before.
        """
        possible = [_layouts(tensor, num_samples) for tensor in tensors]
        default = possible if is_certain else [ONE_ROW_PER_SAMPLE] * len(tensors)
        before = self._layouts.get(len(tensors), default)
        common = [now & then for now, then in zip(possible, before, strict=True)]
        if tensors and not any(possible if is_certain else common):
            raise UsageError(
                f"forward_backward was given a batch of shape {tuple(tensors[0].shape)}; the "
                f"loader's last share has {num_samples} samples. Give it what the loader yields or "
                "run.to_device makes of that, call it on each batch before the next one is "
                "fetched, give another loader to run.prepare too, say how many samples are left, "
                "rows=len(x), or prepare without the loader for batches of your own."
            )
        self._layouts[len(tensors)] = [
            now or then for now, then in zip(common, before, strict=True)
        ]


def _shares_of(arguments: Sequence[Any], sources: Sequence[BatchRegistry]) -> list[BatchShard]:
    """Return the shares of different sizes that these tensors were yielded with."""
    tensors = _with_dims(arguments if are_tensors(arguments) else tensors_in(arguments))
    found = filter(None, (yielded.shard_of(tensor) for yielded in sources for tensor in tensors))
    return [*{(share.rows, share.global_rows): share for share in found}.values()]


def _add_to(digest: Any, batch: Any) -> bool:
    """Add the tensors of a batch to a hash; return False if there are none."""
    tensors = [t for t in tensors_in(batch) if t.layout is torch.strided and not t.is_nested]
    for tensor in tensors:
        digest.update(as_bytes(tensor.detach().cpu()).numpy().data)
    return bool(tensors)


def _layouts(tensor: Tensor, num_samples: int) -> Layouts:
    """Return the layouts in which a tensor can hold so many samples."""
    layouts: Layouts = set()
    if tensor.shape[0] % num_samples == 0:
        # One row or several for each sample: (batch x sequence, features) has several.
        layouts.add((0, tensor.shape[0] // num_samples))
    if tensor.dim() > 1 and tensor.shape[1] == num_samples:
        layouts.add((1, 1))  # (sequence, batch, ...)
    return layouts


def _with_dims(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that can have a row for each sample."""
    return [tensor for tensor in tensors if tensor.dim()]


def _have_one_size(sources: Sequence[BatchRegistry]) -> bool:
    """Return True if all shares that these have yielded are of one size."""
    return len(set[tuple[int, int]]().union(*(yielded.sizes for yielded in sources))) == 1


def _length(arguments: Sequence[Any]) -> int:
    """Return the number of samples that the tensors and lists of a batch agree on."""
    is_plain = are_tensors(arguments)
    tensors = _with_dims(arguments if is_plain else tensors_in(arguments))
    if not tensors:
        raise UsageError(
            "forward_backward: the batch has no tensor, so its number of samples is unknown. Say "
            "it: run.forward_backward(compute_loss, *batch, rows=8)."
        )
    length = len(tensors[0])
    if is_plain and all(len(tensor) == length for tensor in tensors):
        return length
    try:
        return rows_of(dict(enumerate(arguments)))
    except UsageError:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise UsageError(
            f"forward_backward: tensors of shapes {found} have different lengths, so the number of "
            "samples is unknown. Say it: run.forward_backward(compute_loss, *batch, rows=8)."
        ) from None


class BatchPlaces(NamedTuple):
    """Places of the batches of a rank so far; equal on all ranks that compute the same batches.

    Attributes:
        unknown: batches without a place: no prepared loader has made any of their tensors.
        checksum: of all places.
        epoch, stop: place of the last one: the position in its epoch after it.
        samples: checksum of the indices of the last one.
        shared: checksum of batches that were shared.
        data: checksum of what the data sets hold, of loaders in their second epoch or later.
    """

    unknown: int = 0
    checksum: int = 0
    epoch: int = 0
    stop: int = 0
    samples: int = 0
    shared: int = 0
    data: int = 0


class BatchHistory:
    """Collects the places of batches, and the values of some that were shared.

    Attributes:
        shared_digest: of the shared batches 1, 2, 4, ... 64 and every 64th.
        loaders: the prepared loaders. Scripts write to their data sets, such as new labels.
    """

    def __init__(self) -> None:
        self._places = BatchPlaces()
        self._indices: tuple[Hashable, ...] = ()
        self._shares = 0
        self.shared_digest = b""
        self.loaders: Sequence[ShardedLoader] = ()

    @property
    def places(self) -> BatchPlaces:
        """Return the places so far. Takes time: it is for steps that are compared."""
        samples, shared = zlib.crc32(repr(self._indices).encode()), zlib.crc32(self.shared_digest)
        again = [fingerprint(loader.dataset) for loader in self.loaders if loader.epoch]
        data = zlib.crc32(repr(again).encode())
        return self._places._replace(samples=samples, shared=shared, data=data)

    def add_shared(self, batch: Any) -> None:
        """Add the values of a global batch, if it is one that is compared."""
        self._shares += 1
        if self._shares % 64 == 0 or not self._shares & (self._shares - 1):
            digest = hashlib.sha256(self.shared_digest)
            _add_to(digest, batch)
            self.shared_digest = digest.digest()

    def add(self, shard: BatchShard | None) -> None:
        """Add the batch of a step; None if its place is not known."""
        unknown, checksum, *_ = self._places
        if shard is None:
            self._places = self._places._replace(unknown=unknown + 1)
        else:
            checksum = zlib.crc32(b"%d %d" % (shard.epoch, shard.stop), checksum)
            self._places = BatchPlaces(unknown, checksum, shard.epoch, shard.stop)
            self._indices = shard.indices


def batches_differ(first: BatchPlaces, rank: int, other: BatchPlaces) -> tuple[str, str]:
    """Return how the batches of rank 0 differ from those of another rank, and the cure; empty if
    they do not, or if that cannot be told.
    """
    if first.shared != other.shared:
        return f"{SHARED}, noticed", SHARED_CURE
    if first.unknown or other.unknown or first._replace(data=other.data) == other:
        return "", ""
    if first.checksum == other.checksum:
        fact = f"the samplers of ranks 0 and {rank} have drawn other samples for their batches"
        return f"{fact}, noticed in epoch {first.epoch}", ORDER_CURE
    if (first.epoch, first.stop) == (other.epoch, other.stop):
        return f"ranks 0 and {rank} have computed steps on different batches", CURE
    return (
        f"rank 0 computes a step on the batch that ends at {first.stop} of epoch {first.epoch}, "
        f"and rank {rank} on the one that ends at {other.stop} of epoch {other.epoch}"
    ), CURE
