"""Lightning's first example, an autoencoder, as ranks of a test run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.integrations.lightning import ShoalStrategy
from shoal.strategies.loss_terms import Counted


class LitAutoEncoder(lightning.LightningModule):
    """The module of Lightning's documentation, with a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 16))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        loss = functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, _ = batch
        self.log("val_loss", functional.mse_loss(self.decoder(self.encoder(x)), x))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.encoder(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class TwoOptimizers(LitAutoEncoder):
    """The same with an optimizer for each part, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, _ = batch
        loss = functional.mse_loss(self.decoder(self.encoder(x)), x)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in self.children()]


class SumOfSamples(LitAutoEncoder):
    """A module whose loss is a sum, as in Lightning's template for bug reports."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.encoder(batch[0]).sum()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}


class CountedTokens(LitAutoEncoder):
    """A module whose loss is a mean over the positive numbers of its samples."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Counted]:
        x, _ = batch
        error = (self.decoder(self.encoder(x)) - x).square()
        loss = shoal.counted((error * (x > 0)).sum(), (x > 0).sum())
        self.log("train_loss", 0.0, on_step=True, on_epoch=True)
        return {"loss": loss}


class MeanOfTokens(LitAutoEncoder):
    """The same for one process, where it is a quotient."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        error = (self.decoder(self.encoder(x)) - x).square()
        self.log("train_loss", 0.0, on_step=True, on_epoch=True)
        return (error * (x > 0)).sum() / (x > 0).sum()


class MixedSamples(LitAutoEncoder):
    """A module that compares its samples, by a submodule."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        codes = functional.normalize(self.encoder(batch[0]))
        loss = functional.cross_entropy(5 * codes @ codes.T, torch.arange(len(codes)))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class OwnBackward(LitAutoEncoder):
    """A module with a backward pass of its own."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class LossHistory(lightning.Callback):
    """Keeps the losses that Lightning's loggers see."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def train(
    strategy: str,
    folder: Path,
    settings: dict[str, Any],
    module: str = "LitAutoEncoder",
    resume: Path | None = None,
    shuffle: bool = False,
    then_test: bool = False,
) -> list[float]:
    """Train three epochs, the last batch of each smaller; return all losses, or `uses_of`.

    Args: strategy: empty for Lightning's own strategy. settings: of the Trainer, and "batch_size".
    """
    batch_size = settings.get("batch_size", 8)
    settings = {name: value for name, value in settings.items() if name != "batch_size"}
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(45, 16, dtype=torch.float64), torch.zeros(45))
    model = globals()[module]()
    chosen: dict[str, Any] = {}
    if strategy:
        chosen["strategy"] = ShoalStrategy(strategy, announce=lambda _: None)
    history = LossHistory()
    callbacks: list[Any] = [history]
    if settings.get("callbacks"):
        callbacks.append(ModelCheckpoint(every_n_train_steps=4, save_top_k=-1))
    trainer = lightning.Trainer(
        **{"max_epochs": 3, "precision": "64-true", "accelerator": "cpu", "devices": 1}
        | {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        | {"default_root_dir": str(folder), "enable_checkpointing": True}
        | chosen
        | settings
        | {"callbacks": callbacks}
    )
    train_loader = DataLoader(data, batch_size=batch_size, shuffle=shuffle)
    whole = DataLoader(data, batch_size=8)
    trainer.fit(model, train_loader, whole, ckpt_path=resume)
    if then_test:
        return uses_of(trainer, model, whole)
    return history.losses


def uses_of(trainer: Any, model: Any, loader: DataLoader) -> list[float]:
    """Return numbers of a trained model: tested, predicted, and loaded from its checkpoint."""
    path = trainer.checkpoint_callback.best_model_path
    (tested,) = trainer.test(model, loader, verbose=False)
    (best,) = trainer.test(model, loader, ckpt_path=path, verbose=False)
    predicted = torch.cat(trainer.predict(model, loader))
    loaded = type(model).load_from_checkpoint(path, weights_only=False)
    weights = torch.cat([each.detach().flatten() for each in loaded.parameters()])
    return [tested["val_loss"], best["val_loss"], *predicted[:, 0].tolist(), *weights.tolist()]


def refusal(strategy: str, *arguments: Any, **options: Any) -> str:
    """Return the error of `train`."""
    try:
        train(strategy, *arguments, **options)
    except Exception as error:  # noqa: BLE001 - Lightning's own too
        return f"{type(error).__name__}: {error}"
    return ""
