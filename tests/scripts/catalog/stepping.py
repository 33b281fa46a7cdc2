"""Unusual steps: two passes, several batches, closures, branches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, integers, loader, mlp, normal, vectors
from tests.scripts.script import Script, weights


class SharpnessAware(Script):
    """Two passes a step: one climbs, the second gives the gradient there."""

    follows = "davda54/sam"
    needs = "WO"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
        losses = []
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                climbs = [0.05 * p.grad / norm for p in model.parameters()]
                for parameter, climb in zip(model.parameters(), climbs, strict=True):
                    parameter.add_(climb)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter, climb in zip(model.parameters(), climbs, strict=True):
                    parameter.sub_(climb)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            loss = run.forward_backward(compute_loss, x, y)
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                climbs = [0.05 * p.grad / norm for p in model.parameters()]
                for parameter, climb in zip(model.parameters(), climbs, strict=True):
                    parameter.add_(climb)
            optimizer.zero_grad()
            run.forward_backward(compute_loss, x, y)
            with torch.no_grad():
                for parameter, climb in zip(model.parameters(), climbs, strict=True):
                    parameter.sub_(climb)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses, run.weights()


class AccumulationByHand(Script):
    """Two batches for each step, the loss divided by two."""

    follows = "many: loss / accumulation_steps"
    needs = "A"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors(), batch_size=3))
        losses = []
        for number, (x, y) in enumerate(data, start=1):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors(), batch_size=3)))

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y) / 2

        losses = []
        for number, (x, y) in enumerate(data, start=1):
            loss = run.forward_backward(compute_loss, x, y)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
        return losses, run.weights()


class BackwardByHand(Script):
    """The script still calls `loss.backward()` itself: Shoal is not asked for the gradients."""

    follows = "any script with one line forgotten"
    needs = "W"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
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
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ClippingByTorch(OneLossScript):
    """Clipping by torch's own function, which sees this rank's gradients only."""

    follows = "any script, clipping unchanged"
    needs = "W"

    def before_step(self, step, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class SecondOptimizerState(OneLossScript):
    """A learning rate for each layer, weight decay for matrices only, Nesterov, warm restarts."""

    follows = "timm's parameter groups"

    def setup(self):
        model = mlp(6, 8, 8, 4)
        groups = [
            {"params": [layer.weight], "lr": 0.1 * 0.7**depth, "weight_decay": 0.05}
            for depth, layer in enumerate(model[::2])
        ]
        groups.append({"params": [layer.bias for layer in model[::2]], "weight_decay": 0.0})
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
        self.restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        data = loader(*vectors())
        return model, optimizer, data

    def after_step(self, step, model, optimizer, losses):
        self.restarts.step()


class UnusedBranch(OneLossScript):
    """One of two heads is used, by the step's number; the other has no gradient."""

    follows = "multi-task training, one task a step"
    needs = "U"

    def setup(self):
        self.step = 0
        heads = nn.ModuleList(mlp(8, 4, seed=i) for i in (1, 2))
        data = loader(normal(SAMPLES, 6), integers(4, SAMPLES))
        return parts(nn.ModuleList([mlp(6, 8), heads]), data)

    def loss(self, model, x, y):
        return F.cross_entropy(model[1][self.step % 2](model[0](x).relu()), y)

    def after_step(self, step, model, optimizer, losses):
        self.step = step + 1
