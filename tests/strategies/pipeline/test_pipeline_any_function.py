"""A pipeline takes any function of the batch: it calls models in any way, and each rank runs it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.run import init_with_place
from shoal.testing import world

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(16, 8, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(0, 5, (16,), generator=GENERATOR)
TOKENS = torch.randint(0, 11, (16, 6), generator=GENERATOR)
Function = Callable[[Tensor, Tensor], Any]


def tower(widths: tuple[int, ...] = (8, 12, 12, 12, 5)) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers)


def two_towers() -> tuple[list[nn.Module], Function]:
    """Contrast of two towers within a row, and a teacher that is not trained."""
    left, right, teacher = tower(), tower(), tower()
    teacher.requires_grad_(False)

    def compute_loss(x: Tensor, y: Tensor) -> Any:
        one = F.normalize(left(x), dim=-1)
        other = F.normalize(right(input=x.flip(1)), dim=-1)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        loss = -(one * other).sum(-1).mean() + F.cross_entropy(one, y)
        return loss + F.kl_div(other.log_softmax(-1), wanted, reduction="batchmean")

    return [left, right, teacher], compute_loss


def siamese() -> tuple[list[nn.Module], Function]:
    """One model called twice, and a submodule and a parameter used by themselves."""
    model = tower()

    def compute_loss(x: Tensor, y: Tensor) -> Any:
        near, far = model(x), model(x * 2)
        direct = model[3](model[2](model[1](model[0](x))))
        weight = model[1][0].weight
        loss = F.cross_entropy(near + direct, y) + (near - far).square().mean()
        return loss + 1e-3 * weight.square().sum()

    return [model], compute_loss


class OwnLoss(nn.Module):
    """A language model with a tied head that computes its own loss, called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(6, 8) * 0.1)
        self.register_buffer("scale", torch.full((8,), 0.5))
        layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
        hidden = self.embed(tokens) * self.scale + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def own_loss() -> tuple[list[nn.Module], Function]:
    model = OwnLoss()

    def compute_loss(tokens: Tensor, y: Tensor) -> Any:
        out = model(tokens=tokens, labels=tokens.roll(1, 1))
        hits = (out["logits"].argmax(-1) == tokens).sum()
        return out["loss"], {"mean": out["logits"].mean((1, 2)), "hits": shoal.summed(hits)}

    return [model], compute_loss


class Translator(nn.Module):
    """An encoder and a decoder; the decoder's layers read what the encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(source), self.embed(target)))
        return out


def translation() -> tuple[list[nn.Module], Function]:
    model = Translator()

    def compute_loss(tokens: Tensor, y: Tensor) -> Any:
        logits = model(tokens, tokens.flip(1))
        counts = (tokens > 3).double()
        losses = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
        return shoal.counted((losses * counts).sum(), counts.sum())

    return [model], compute_loss


SCENES: dict[str, tuple[Callable[[], tuple[list[nn.Module], Function]], Tensor]] = {
    "two towers": (two_towers, ROWS),
    "siamese": (siamese, ROWS),
    "own loss": (own_loss, TOKENS),
    "translation": (translation, TOKENS),
}


def trained(strategy: str, names: list[str]) -> dict[str, Any]:
    """Return losses, gradients, extras and sums of an evaluation, of each scene."""
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        run = init_with_place(strategy, precision="fp64", announce=lambda _: None)
        make, inputs = SCENES[name]
        models, compute_loss = make()
        for model in models:
            model.double()
        trainable = [p for model in models for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(list(dict.fromkeys(trainable)), lr=0.1)
        loader = DataLoader(TensorDataset(inputs, CLASSES), batch_size=8)
        *prepared, optimizer, batches = run.prepare(*models, optimizer, loader)
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            out = run.forward_backward(compute_loss, *batch)
            loss, extra = out if isinstance(out, tuple) else (out, {})
            found[f"{name} {step} loss"] = loss
            found |= {f"{name} {step} {key}": value for key, value in extra.items()}
            found |= {f"{name} {step} {key}": v for key, v in run.gradients().items()}
            optimizer.step()
        sums = run.evaluate(
            lambda x, y, model=prepared[0], name=name: {"sum": _output(model, name, x).sum()},
            DataLoader(TensorDataset(inputs, CLASSES), batch_size=4),
        )
        found[f"{name} evaluated"] = torch.tensor(sums["sum"], dtype=torch.float64)
        if name != "siamese":
            found[f"{name} by hand"] = _output(prepared[0], name, inputs[:3]).detach()
    return {key: value for key, value in found.items() if value is not None}


def _output(model: nn.Module, name: str, inputs: Tensor) -> Tensor:
    if name == "own loss":
        output: Tensor = model(tokens=inputs)["logits"]
    elif name == "translation":
        output = model(inputs, inputs.flip(1))
    else:
        output = model(inputs)
    return output


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("pipeline=2,schedule=zbv", 2, marks=pytest.mark.slow),
        pytest.param("pipeline=3,microbatches=3", 3, marks=pytest.mark.slow),
        pytest.param("pipeline=2,schedule=zero-bubble", 2, marks=pytest.mark.slow),
        pytest.param("pipeline=2,schedule=interleaved", 2, marks=pytest.mark.slow),
        pytest.param("pipeline=2,schedule=gpipe,ddp", 4, marks=pytest.mark.slow),
        pytest.param("pipeline=2,zero1", 4, marks=pytest.mark.slow),
    ],
)
def test_any_function_trains_as_in_one_process(strategy: str, ranks: int) -> None:
    names = [*SCENES]
    [expected] = world.run(1, trained, "single", names)
    for found in world.run(ranks, trained, strategy, names):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if found[name].shape != value.shape:
                assert name.endswith(" mean")  # extras of this data rank's rows
                continue
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
