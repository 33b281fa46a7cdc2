"""Models, data and losses that every strategy is checked on. One row a case."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.models import build
from shoal.testing.check_strategy import Case

SAMPLES = 31  # global batches of 10, 10, 10, 1: with several ranks the last one leaves some without a sample


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 10, (SAMPLES,), generator=generator))


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 17, (SAMPLES, 13), generator=generator)
    y = x.roll(-1, dims=1)
    # Samples of different length: a mean over rows would weigh their tokens wrongly.
    y[torch.arange(13) > torch.randint(3, 13, (SAMPLES, 1), generator=generator)] = -100
    return TensorDataset(x, y)


def pairs_of_images() -> TensorDataset:
    x, y = images().tensors
    return TensorDataset(x, x.flip(0), y)


def mean_over_tokens(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return total, (target != -100).sum()


def mlp() -> nn.Module:
    return build("mlp", 10, (1, 8, 8), {"hidden": (12,)})


def cnn() -> nn.Module:
    return build("residual_cnn", 10, (1, 8, 8), {"widths": (4, 8), "groups": 2})


def lstm() -> nn.Module:
    return build("lstm", 17, (13,), {"width": 8, "layers": 2})


def gpt() -> nn.Module:
    return build("gpt", 17, (13,), {"width": 8, "layers": 2, "heads": 2})


class Uneven(nn.Module):
    """A parameter that is never used, one that is frozen, and one that is shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 10)
        self.first, self.second, self.unused = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(self.embed(x.flatten(1)))))
        return hidden


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mixed: Tensor = self.left(x.flatten(1)) * self.right(y.flatten(1))
        return mixed


CASES = {
    "mlp": Case(mlp, images, F.cross_entropy),
    "cnn": Case(cnn, images, F.cross_entropy),
    "lstm": Case(lstm, tokens, mean_over_tokens),
    "gpt": Case(gpt, tokens, mean_over_tokens),
    "unused, frozen and shared parameters": Case(Uneven, images, F.cross_entropy),
    "two inputs": Case(TwoInputs, pairs_of_images, F.cross_entropy),
}
