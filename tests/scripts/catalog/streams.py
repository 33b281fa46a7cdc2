"""Data without a length, lists of batches, samplers of one's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shoal
from tests.scripts.catalog.language import Gpt
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import (
    BATCH,
    PADDED,
    VOCABULARY,
    built,
    generator,
    integers,
    mlp,
    sgd,
    uneven_sequences,
    vectors,
)
from tests.scripts.script import Script, weights


class Stream(IterableDataset):
    """Samples one after the other, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*vectors(), strict=True)


class EndlessStream(OneLossScript):
    """An iterable data set: nobody knows its length beforehand."""

    follows = "webdataset in open_clip"
    needs = "I"

    def setup(self):
        return parts(mlp(6, 8, 4), DataLoader(Stream(), batch_size=BATCH))


class Packed(IterableDataset):
    """Texts of uneven lengths, packed into rows of eight tokens as they come."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rest: list[int] = []
        for number in range(30):
            rest += integers(VOCABULARY, 3 + number % 5, seed=number).tolist()
            while len(rest) >= 8:
                row, rest = torch.tensor(rest[:8]), rest[8:]
                yield {"x": row[:-1], "y": row[1:].masked_fill(row[1:] == 0, PADDED)}


class StreamedText(OneLossScript):
    """Packed rows of a stream, as dicts; separators do not count."""

    follows = "transformers run_clm.py --streaming"
    needs = "IKC"

    def setup(self):
        return parts(built(Gpt), DataLoader(Packed(), batch_size=BATCH))

    def loss(self, model, x, y):
        return F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())

    def shoal_loss(self, run, model, x, y):
        loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), reduction="sum")
        return shoal.counted(loss, (y != PADDED).sum())


class ByLength(Sampler):
    """Batches of other sizes: long samples come in small batches."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14])

    def __len__(self) -> int:
        return 3


class LengthBuckets(OneLossScript):
    """A batch sampler of one's own, with batches of other sizes."""

    follows = "facebookresearch/fairseq, tokens per batch"
    needs = "VC"

    def setup(self):
        return parts(
            built(Gpt), DataLoader(TensorDataset(*uneven_sequences()), batch_sampler=ByLength())
        )

    def loss(self, model, x, y):
        return F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())

    def shoal_loss(self, run, model, x, y):
        loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), reduction="sum")
        return shoal.counted(loss, (y != PADDED).sum())


class ListOfBatches(Script):
    """Batches in a list, made once; there is no DataLoader."""

    follows = "torch tutorials, toy data"
    needs = "N"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, *run.share((x, y)))
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ForgottenShare(Script):
    """Batches in a list, given to every rank whole."""

    follows = "torch tutorials, toy data, batches not shared"
    needs = "N"

    plain = ListOfBatches.plain

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class Curriculum(Script):
    """The data set grows from phase to phase."""

    follows = "AllenNLP curricula"
    needs = "F"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        losses = []
        for size in (7, 12, 18):
            data = DataLoader(TensorDataset(x[:size], y[:size]), batch_size=BATCH)
            for inputs, labels in data:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(inputs, labels):
            return F.cross_entropy(model(inputs), labels)

        losses = []
        for size in (7, 12, 18):
            data = DataLoader(TensorDataset(x[:size], y[:size]), batch_size=BATCH)
            data = run.prepare(data)
            for inputs, labels in data:
                optimizer.zero_grad()
                loss = run.forward_backward(compute_loss, inputs, labels)
                optimizer.step()
                losses.append(loss)
        return losses, run.weights()


class BalancedSampler(OneLossScript):
    """Rare classes are drawn more often, by torch's sampler with a generator of its own."""

    follows = "ufoym/imbalanced-dataset-sampler"

    def setup(self):
        model = mlp(6, 8, 4)
        x, y = vectors()
        chances = (1 / y.bincount().double())[y]
        torch.manual_seed(3)
        order = list(WeightedRandomSampler(chances, 18, generator=generator(4)))
        return parts(model, DataLoader(TensorDataset(x, y), batch_size=BATCH, sampler=order))
