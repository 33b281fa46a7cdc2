"""Recommendation and tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import (
    BATCH,
    SAMPLES,
    ListOfSamples,
    built,
    integers,
    loader,
    mlp,
    normal,
    sgd,
)
from tests.scripts.script import Script, weights


class ClickModel(nn.Module):
    """Dense features and bags of ids; the bags' gradients are sparse if asked for."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(n, 4, mode="sum", sparse=sparse) for n in (10, 20)
        )
        self.bottom, self.top = nn.Linear(6, 4), nn.Linear(7, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        parts = [self.bottom(dense)] + [bag(ids[:, i]) for i, bag in enumerate(self.bags)]
        features = torch.stack(parts, 1)
        i, j = torch.triu_indices(3, 3, 1)
        products = (features @ features.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([parts[0], products], 1)).squeeze(1)


def _clicks() -> DataLoader:
    ids = integers(10, SAMPLES, 2, 3)
    return loader(normal(SAMPLES, 6), ids, integers(2, SAMPLES, seed=3).double())


class ClickPrediction(OneLossScript):
    """Bags of ids beside dense features; dense gradients."""

    follows = "facebookresearch/dlrm"

    def setup(self):
        return parts(built(ClickModel, False), _clicks())

    def loss(self, model, dense, ids, click):
        return F.binary_cross_entropy_with_logits(model(dense, ids), click)


class SparseClicks(Script):
    """Sparse gradients of the bags under their own optimizer, dense ones under another."""

    follows = "facebookresearch/dlrm with sparse embeddings"
    needs = "ZO"

    @staticmethod
    def plain():
        model = built(ClickModel, True)
        sparse = torch.optim.SGD(model.bags.parameters(), lr=0.1)
        dense_step = sgd([*model.bottom.parameters(), *model.top.parameters()])
        data = _clicks()
        losses = []
        for dense, ids, click in data:
            model.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(dense, ids), click)
            loss.backward()
            sparse.step()
            dense_step.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(ClickModel, True)
        sparse = torch.optim.SGD(model.bags.parameters(), lr=0.1)
        dense_step = sgd([*model.bottom.parameters(), *model.top.parameters()])
        data = _clicks()
        model, sparse, dense_step, data = run.prepare(model, sparse, dense_step, data)

        def compute_loss(dense, ids, click):
            return F.binary_cross_entropy_with_logits(model(dense, ids), click)

        losses = []
        for dense, ids, click in data:
            model.zero_grad()
            loss = run.forward_backward(compute_loss, dense, ids, click)
            sparse.step()
            dense_step.step()
            losses.append(loss)
        return losses, run.weights()


class RaggedBags(OneLossScript):
    """Bags of other lengths, given as one list of ids and where each begins."""

    follows = "torch EmbeddingBag, the text classification tutorial"
    needs = "V"

    def setup(self):
        return parts(built(TextBag), _texts())

    def loss(self, model, ids, begins, label):
        return F.cross_entropy(model(ids, begins), label)


class TextBag(nn.Module):
    """The mean of a text's words, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(12, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, begins: Tensor) -> Tensor:
        return self.head(self.bag(ids, begins))


def _texts() -> DataLoader:
    lengths = integers(4, SAMPLES, seed=7) + 1
    samples = [(integers(12, int(n), seed=i), i % 4) for i, n in enumerate(lengths)]
    return DataLoader(ListOfSamples(samples), batch_size=BATCH, collate_fn=_flat)


def _flat(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([0] + [len(ids) for ids, _ in samples])
    begins = lengths.cumsum(0)[:-1]
    return torch.cat([ids for ids, _ in samples]), begins, torch.tensor([y for _, y in samples])


class TwoTowers(Script):
    """Each user against the items of the whole batch, corrected by the items' frequencies."""

    follows = "TensorFlow Recommenders, in torch"
    needs = "GM"

    @staticmethod
    def plain():
        users, items = nn.Sequential(nn.Embedding(20, 4)), nn.Sequential(nn.Embedding(20, 4))
        for tower, seed in ((users, 0), (items, 1)):
            nn.init.normal_(tower[0].weight, generator=torch.Generator().manual_seed(seed))
        optimizer = sgd([*users.parameters(), *items.parameters()])
        data = loader(integers(20, SAMPLES), integers(20, SAMPLES, seed=2))
        frequency = torch.linspace(0.01, 0.1, 20)
        losses = []
        for user, item in data:
            optimizer.zero_grad()
            scores = users(user) @ items(item).T - frequency[item].log()
            loss = F.cross_entropy(scores, torch.arange(len(user)))
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(users, items)

    @staticmethod
    def with_shoal(run):
        users, items = nn.Sequential(nn.Embedding(20, 4)), nn.Sequential(nn.Embedding(20, 4))
        for tower, seed in ((users, 0), (items, 1)):
            nn.init.normal_(tower[0].weight, generator=torch.Generator().manual_seed(seed))
        optimizer = sgd([*users.parameters(), *items.parameters()])
        data = loader(integers(20, SAMPLES), integers(20, SAMPLES, seed=2))
        frequency = torch.linspace(0.01, 0.1, 20)
        users, items, optimizer, data = run.prepare(users, items, optimizer, data)

        def compute_loss(user, item):
            every = run.gather(items(item))
            scores = users(user) @ every.T - frequency[run.gather(item)].log()
            return F.cross_entropy(scores, torch.arange(len(every))[run.rows])

        losses = []
        for user, item in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, user, item)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class TabularTransformer(nn.Module):
    """One token for each number of a row, and a token that predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(5, 8)) for _ in range(2))
        self.token = nn.Parameter(torch.randn(8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None] * self.scale + self.shift
        h = torch.cat([self.token.expand(len(x), 1, 8), tokens], 1)
        return self.head(self.block(h)[:, 0]).squeeze(1)


class Tables(OneLossScript):
    """Regression on rows of a table; the target is normalised by hand."""

    follows = "yandex-research/rtdl FT-Transformer"

    def setup(self):
        model = built(TabularTransformer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        y = normal(SAMPLES, seed=1)
        data = loader(normal(SAMPLES, 5), (y - y.mean()) / y.std())
        return model, optimizer, data

    def loss(self, model, x, y):
        return F.huber_loss(model(x), y)


class RootMeanSquare(OneLossScript):
    """A root of the mean over the batch, which is no mean of roots."""

    follows = "Kaggle regression baselines"
    needs = "G"

    def setup(self):
        return parts(mlp(5, 8, 1), loader(normal(SAMPLES, 5), normal(SAMPLES, seed=1)))

    def loss(self, model, x, y):
        return F.mse_loss(model(x).squeeze(1), y).sqrt()
