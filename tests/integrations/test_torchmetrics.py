"""Metrics of torchmetrics in `run.evaluate`: each sample counts once on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.testing import world

torchmetrics = pytest.importorskip("torchmetrics", reason="pip install shoal[lightning]")
CLASSES = {"task": "multiclass", "num_classes": 3}


def measures() -> dict[str, Any]:
    y = torch.arange(23) % 3
    scores = torch.eye(3)[(y * y) % 3] + torch.linspace(0, 0.9, 23).unsqueeze(1)
    loader = DataLoader(TensorDataset(scores, y), batch_size=5)
    metrics = {
        "auc": torchmetrics.AUROC(**CLASSES),
        "confusion": torchmetrics.ConfusionMatrix(**CLASSES),
    }
    run = shoal.init(announce=str)
    return run.evaluate(lambda scores, y: (scores.softmax(-1), y), loader, metrics=metrics)


def test_each_sample_counts_once_on_any_number_of_ranks() -> None:
    expected = measures()
    assert expected["confusion"].sum() == 23
    for found in world.run(3, measures):
        assert found["auc"] == expected["auc"]
        assert torch.equal(found["confusion"], expected["confusion"])
