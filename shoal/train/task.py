"""The task of a model: its loss, and the measures of training and of evaluation.

Classification and language modelling are alike here: logits over classes in the last dimension, and
one target for each row of logits. A text has one row for each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.strategies.base import ComputeLoss
from shoal.strategies.loss_terms import Summed, summed


@dataclass(frozen=True)
class Task:
    """Loss and measures of one kind of task.

    Args:
        topk: k of the second accuracy; at most `num_classes` is used.
        label_smoothing: of the training loss; evaluations have none.
    """

    kind: Literal["classification", "language"]
    num_classes: int
    topk: int = 5
    label_smoothing: float = 0.0

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats.

        Args:
            target: class indices (int64), or probabilities of classes (float; batch, classes).
        """
        return F.cross_entropy(
            *_flatten_tokens(logits, target), label_smoothing=self.label_smoothing
        )

    def compute_loss(self, model: nn.Module) -> ComputeLoss:
        """Return the function (inputs, target) -> (loss, hits) of a training step.

        Hits are (correct predictions, predictions), summed over all ranks.
        """

        def compute(inputs: Tensor, target: Tensor) -> tuple[Tensor, Summed]:
            logits = model(inputs)
            return self.loss(logits, target), summed(self.num_correct(logits, target))

        return compute

    def num_correct(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return (correct predictions, predictions) of the batch, shape (2,)."""
        logits, target = _flatten_tokens(logits.detach(), target)
        labels = target if target.dim() == 1 else target.argmax(dim=1)
        correct = (logits.argmax(dim=1) == labels).sum()
        return torch.stack([correct, correct.new_full((), len(labels))])

    def measures(self, logits: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return sums over the batch for an evaluation: loss in nats, hits of top 1 and top k."""
        samples = len(target)
        logits, target = _flatten_tokens(logits, target)
        best = logits.topk(min(self.topk, self.num_classes), dim=1).indices == target[:, None]
        losses = F.cross_entropy(logits.double(), target, reduction="none")
        return {
            # First a sum for each sample: torch divides one long sum among threads, and then its
            # last bit depends on their number.
            "loss": losses.view(samples, -1).sum(dim=1).sum(),
            "top1": best[:, 0].sum(),
            "topk": best.sum(),
            "predictions": best.new_full((), len(target), dtype=torch.float64),
        }

    def report(self, sums: dict[str, float]) -> dict[str, float | int]:
        """Return `loss` (nats per prediction), `top1` and `top5` (percent) and `samples`.

        A text has `perplexity` too.
        """
        count = sums["predictions"]
        loss = sums["loss"] / count
        report: dict[str, float | int] = {
            "loss": loss,
            "top1": 100 * sums["top1"] / count,
            f"top{min(self.topk, self.num_classes)}": 100 * sums["topk"] / count,
            "samples": int(sums["samples"]),
        }
        if self.kind == "language":
            report["perplexity"] = _exponential(loss)
        return report

    def score(self, report: Mapping[str, float]) -> tuple[float, ...]:
        """Return a tuple by which evaluations are compared: the greater one is better.

        Texts are compared by their loss. Images are compared by their accuracy, and by their loss
        if accuracies are equal, as happens with few validation samples. NaN is worse than any
        number.
        """
        ranked_by_loss = self.kind == "language"
        scores = (-report["loss"],) if ranked_by_loss else (report["top1"], -report["loss"])
        return tuple(-math.inf if math.isnan(score) else score for score in scores)

    def training_report(self, loss: float, hits: float, predictions: float) -> dict[str, float]:
        """Return the measures that are logged in training: `loss`, and `top1` or `perplexity`."""
        if self.kind == "language":
            return {"loss": loss, "perplexity": _exponential(loss)}
        return {"loss": loss, "top1": 100 * hits / max(predictions, 1.0)}


def _flatten_tokens(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows, classes) and (rows,): batch and time of a text become one dimension."""
    if logits.dim() == 2:
        return logits, target
    return logits.flatten(0, -2), target.flatten()


def _exponential(loss: float) -> float:
    # exp(710) overflows float64, and math.exp raises then.
    return math.exp(loss) if loss < 700 else math.inf
