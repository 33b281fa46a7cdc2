"""Training steps whose numbers couple the samples of a batch, for ranks and for one device."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data.loader import DistributedBatchLoader
from shoal.data.seeds import derive_seed

STEPS = 4
Loss = Callable[..., Any]


def pairs(batch_size: int) -> DataLoader:
    """Return batches of two views and a label of each sample; the last batch is short."""
    generator = torch.Generator().manual_seed(3)
    x, z = torch.randn(2, 3 * batch_size + 2, 6, generator=generator).double()
    return DataLoader(TensorDataset(x, z, torch.arange(len(x)) % 4), batch_size=batch_size)


def trained(
    strategy: str,
    model: nn.Module,
    make_loss: Callable[[Any, nn.Module], Loss],
    batch_size: int = 7,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float], list[str]]:
    """Train four steps; return the weights and buffers, the losses and the lines announced."""
    lines: list[str] = []
    run = shoal.init(strategy, precision="fp64", announce=lines.append, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, pairs(batch_size))
    compute_loss = make_loss(run, model)
    losses = []
    for x, z, y in loader:
        result = run.forward_backward(compute_loss, x, z, y)
        losses.append(float(result[0] if isinstance(result, tuple) else result))
        optimizer.step()
        optimizer.zero_grad()
    return run.weights(), losses, lines


class OneDevice:
    """In the place of a run: all rows are here."""

    rows = slice(None)

    def gather(self, x: Tensor, views: int = 1) -> Tensor:
        return x


def trained_plainly(
    model: nn.Module, make_loss: Callable[[Any, nn.Module], Loss], batch_size: int = 7
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in a loop without Shoal, with the random numbers of its first rank."""
    torch.manual_seed(derive_seed(0, 0))
    random.seed(0)
    np.random.seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compute_loss = make_loss(OneDevice(), model)
    losses = []
    # An iterator of a plain loader would draw a seed.
    for x, z, y in DistributedBatchLoader(pairs(batch_size), rank=0, ranks=1, seed=0):
        loss = compute_loss(x, z, y)
        if isinstance(loss, tuple):
            (term,) = loss[0].terms
            loss = term.value / term.count
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def whole_contrastive_loss(run: Any, model: nn.Module) -> Loss:
    def compute_loss(x: Tensor, z: Tensor, _y: Tensor) -> Tensor:
        a, b = run.gather(model(x)), run.gather(model(z))
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    return compute_loss


def contrastive_loss_of_own_rows(run: Any, model: nn.Module) -> Loss:
    def compute_loss(x: Tensor, z: Tensor, _y: Tensor) -> Tensor:
        own, everyone = model(x), run.gather(model(z))
        return F.cross_entropy(own @ everyone.T, torch.arange(len(everyone))[run.rows])

    return compute_loss


def mixup_loss(run: Any, model: nn.Module) -> Loss:
    """Each sample is mixed with one of the whole batch, before the first layer."""

    def compute_loss(x: Tensor, _z: Tensor, y: Tensor) -> Tensor:
        everyone, labels = run.gather(x), run.gather(y)
        order = torch.arange(len(everyone)).flip(0)[run.rows]
        out = model(0.7 * x + 0.3 * everyone[order])
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, labels[order])

    return compute_loss


def contrastive_loss_of_one_call(run: Any, model: nn.Module) -> Loss:
    def compute_loss(x: Tensor, z: Tensor, _y: Tensor) -> Tensor:
        a, b = model(torch.cat((x, z))).chunk(2)
        everyone = run.gather(b)
        return F.cross_entropy(a @ everyone.T, torch.arange(len(everyone))[run.rows])

    return compute_loss


def contrastive_loss_of_views(run: Any, model: nn.Module) -> Loss:
    """Both views go through the model in one batch, and are gathered so."""

    def compute_loss(x: Tensor, z: Tensor, _y: Tensor) -> Tensor:
        a, b = run.gather(model(torch.cat((x, z))), views=2).chunk(2)
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    return compute_loss


def contrastive_loss_of_ranks_in_turn(run: Any, model: nn.Module) -> Loss:
    """The same without the number of views."""

    def compute_loss(x: Tensor, z: Tensor, _y: Tensor) -> Tensor:
        a, b = run.gather(model(torch.cat((x, z)))).chunk(2)
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    return compute_loss


def counted_contrastive_loss(run: Any, model: nn.Module) -> Loss:
    """Of own rows, with weights; labels are gathered too."""

    def compute_loss(x: Tensor, z: Tensor, y: Tensor) -> Any:
        own, everyone, labels = model(x), run.gather(model(z)), run.gather(y)
        losses = (labels == y[:, None]) * (own @ everyone.T).cos()
        return shoal.counted((losses.sum(1) * (y + 1)).sum(), (y + 1).sum()), {"own": own}

    return compute_loss


def contrastive_loss_behind_layers(run: Any, model: nn.Module) -> Loss:
    """Gathered rows go through a layer of the model once more."""

    def compute_loss(x: Tensor, z: Tensor, _y: Tensor) -> Tensor:
        own = model(x)
        everyone = model[2](model[1](run.gather(model[0](z))))
        return F.cross_entropy(own @ everyone.T, torch.arange(len(everyone))[run.rows])

    return compute_loss


def contrastive_loss_behind_one_layer(run: Any, model: nn.Module) -> Loss:
    """Gathered inputs go through the whole model."""

    def compute_loss(x: Tensor, z: Tensor, _y: Tensor) -> Tensor:
        everyone = model(run.gather(z * (1 + model[0].bias[:6])))
        return everyone.square().mean() * (1 + x.mean())

    return compute_loss


def gathered_twice_loss(run: Any, model: nn.Module) -> Loss:
    def compute_loss(x: Tensor, _z: Tensor, _y: Tensor) -> Tensor:
        rows = run.gather(model(x))
        return run.gather(rows[run.rows] - rows.square().mean(0)).square().mean()

    return compute_loss


class Noisy(nn.Module):
    """Dropout as a layer and as a function, and noise in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(9, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.first(x)))
        x = F.dropout(x + 0.1 * torch.randn_like(x), 0.2, self.training)
        logits: Tensor = self.second(x)
        return logits


def noisy_loss(_run: Any, model: nn.Module) -> Loss:
    def compute_loss(x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        # Numbers of Python and NumPy are for the batch, those of torch for its rows.
        mixed = (x + float(np.random.rand()) * z) * (1 + random.random())
        times = torch.randint(1, 5, (len(x), 1))
        noise = torch.rand(len(x), 6, dtype=torch.float64) * times
        return F.cross_entropy(model(mixed + noise), y)

    return compute_loss


def batchnorm_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4)
    ).double()


def batchnorm_over_space() -> nn.Module:
    """Return a model whose BatchNorm has several values for each channel of a sample."""
    layers = nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(1), nn.Linear(6, 4)
    return nn.Sequential(*layers).double()


def plain_loss(_run: Any, model: nn.Module) -> Loss:
    return lambda x, _z, y: F.cross_entropy(model(x), y)


def permuting_loss(_run: Any, model: nn.Module) -> Loss:
    return lambda x, _z, y: F.cross_entropy(model(x + x[torch.randperm(len(x))]), y)


def loss_of_ones_own_batch(run: Any, model: nn.Module) -> Loss:
    def compute_loss(x: Tensor, _z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    run.forward_backward(
        compute_loss, *[torch.ones(3, 6).double()] * 2, torch.ones(3).long(), rows=3
    )
    return compute_loss
