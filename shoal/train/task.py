"""What is learned: the loss, what is measured while training, and what an evaluation reports.

Classification and language modelling are the same here: logits over classes in the last dimension,
and a target for each row of them. A text has one row for each token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """Args: topk: k of the second accuracy, at most `num_classes`. label_smoothing: for
    training alone.
    """

    kind: Literal["classification", "language"]
    num_classes: int
    topk: int = 5
    label_smoothing: float = 0.0

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats. `target`: class numbers, or float probabilities (batch,
        classes).
        """
        return F.cross_entropy(
            *_flatten_tokens(logits, target), label_smoothing=self.label_smoothing
        )

    def num_correct(self, logits: Tensor, target: Tensor) -> Tensor:
        """(2,): correct predictions and predictions, over the batch."""
        logits, target = _flatten_tokens(logits.detach(), target)
        labels = target if target.dim() == 1 else target.argmax(dim=1)
        correct = (logits.argmax(dim=1) == labels).sum()
        return torch.stack([correct, correct.new_full((), len(labels))])

    def measures(self, logits: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Sums over the batch, for an exact evaluation: loss in nats without smoothing, hits of
        top 1 and top k.
        """
        samples = len(target)
        logits, target = _flatten_tokens(logits, target)
        best = logits.topk(min(self.topk, self.num_classes), dim=1).indices == target[:, None]
        losses = F.cross_entropy(logits.double(), target, reduction="none")
        return {
            # Sample by sample: one long sum is split between threads, and its last bit would depend
            # on their number.
            "loss": losses.view(samples, -1).sum(dim=1).sum(),
            "top1": best[:, 0].sum(),
            "topk": best.sum(),
            "predictions": best.new_full((), len(target), dtype=torch.float64),
        }

    def report(self, sums: dict[str, float]) -> dict[str, float | int]:
        """`loss` (nats per prediction), `top1` and `top5` (percent), `samples`; `perplexity`
        for text.
        """
        count = sums["predictions"]
        loss = sums["loss"] / count
        found: dict[str, float | int] = {
            "loss": loss,
            "top1": 100 * sums["top1"] / count,
            f"top{min(self.topk, self.num_classes)}": 100 * sums["topk"] / count,
            "samples": int(sums["samples"]),
        }
        return found | ({"perplexity": _exponential(loss)} if self.kind == "language" else {})

    def score(self, report: Mapping[str, float]) -> tuple[float, ...]:
        """Rank an evaluation: the greater tuple is the better one, and any number is better than
        NaN.

        Texts are ranked by their loss. Images are ranked by their accuracy; few validation samples
        often give equal accuracies, and of these the lower loss is the better one."""
        ranked_by_loss = self.kind == "language"
        scores = (-report["loss"],) if ranked_by_loss else (report["top1"], -report["loss"])
        return tuple(-math.inf if math.isnan(score) else score for score in scores)

    def training_report(self, loss: float, hits: float, predictions: float) -> dict[str, float]:
        """What is logged about training: `loss`, and `top1` or `perplexity`."""
        if self.kind == "language":
            return {"loss": loss, "perplexity": _exponential(loss)}
        return {"loss": loss, "top1": 100 * hits / max(predictions, 1.0)}


def _flatten_tokens(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, classes) and (rows,): a text's batch and time as one dimension."""
    if logits.dim() == 2:
        return logits, target
    return logits.flatten(0, -2), target.flatten()


def _exponential(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
