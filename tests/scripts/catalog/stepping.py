"""Unusual steps: two passes, gradients and weights touched by hand, closures."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.scripts.samples import SAMPLES, integers, loader, mlp, normal, sgd, vectors
from tests.scripts.script import Script, weights


class SharpnessAware(Script):
    """Two passes a step: one climbs, the second gives the gradient there."""

    follows = "davda54/sam"
    needs = "WO"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
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
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

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


class LayerwiseRates(Script):
    """Each gradient is scaled by the norms of its weight and of itself before the step."""

    follows = "LARS in MLPerf"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters(), 1.0)
        data = loader(*vectors())
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.param_groups[0]["lr"] = (step + 1) / 3
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.mul_(0.05 * p.norm() / (p.grad.norm() + 1e-4 * p.norm()))
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters(), 1.0)
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.param_groups[0]["lr"] = (step + 1) / 3
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.mul_(0.05 * p.norm() / (p.grad.norm() + 1e-4 * p.norm()))
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class WeightAverage(Script):
    """Stochastic weight averaging with torch's own class, evaluated at the end."""

    follows = "torch.optim.swa_utils"
    needs = "T"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        average = torch.optim.swa_utils.AveragedModel(model)
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            losses += [loss, average(torch.ones(1, 6)).sum()]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        average = torch.optim.swa_utils.AveragedModel(model)
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            average.update_parameters(model)
            losses += [loss, average(torch.ones(1, 6)).sum()]
        return losses, run.weights()


class AverageOfWholeWeights(Script):
    """An average of the weights, made of the whole weights where ranks hold parts of them."""

    follows = "timm ModelEma"
    needs = "T"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        average = copy.deepcopy(model.state_dict())
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            for name, new in model.state_dict().items():
                average[name].mul_(0.9).add_(new, alpha=0.1)
            losses += [loss, average["2.weight"].sum()]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        average = copy.deepcopy(model.state_dict())
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            for name, new in run.weights().items():
                average[name].mul_(0.9).add_(new, alpha=0.1)
            losses += [loss, average["2.weight"].sum()]
        return losses, run.weights()


class ConflictingTasks(Script):
    """Gradients of two tasks are projected on each other and combined by hand."""

    follows = "tianheyu927/PCGrad"
    needs = "WE"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            slopes = []
            for task in (y, 3 - y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), task)
                loss.backward()
                slopes.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                losses.append(loss)
            a, b = slopes
            if (a @ b) < 0:
                a, b = a - (a @ b) / (b @ b) * b, b - (a @ b) / (a @ a) * a
            offset = 0
            for p in model.parameters():
                p.grad = (a + b)[offset : offset + p.numel()].view_as(p).clone()
                offset += p.numel()
            optimizer.step()
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, task):
            return F.cross_entropy(model(x), task)

        losses = []
        for x, y in data:
            slopes = []
            for task in (y, 3 - y):
                optimizer.zero_grad()
                loss = run.forward_backward(compute_loss, x, task)
                slopes.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                losses.append(loss)
            a, b = slopes
            if (a @ b) < 0:
                a, b = a - (a @ b) / (b @ b) * b, b - (a @ b) / (a @ a) * a
            offset = 0
            for p in model.parameters():
                p.grad = (a + b)[offset : offset + p.numel()].view_as(p).clone()
                offset += p.numel()
            optimizer.step()
        return losses, run.weights()


class Pruning(Script):
    """The smallest weights are masked; the others are wound back and train again."""

    follows = "facebookresearch/open_lth"
    needs = "WF"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        start = copy.deepcopy(model.state_dict())
        data = loader(*vectors())
        losses = []
        mask = torch.ones_like(model[0].weight)
        optimizer = sgd(model.parameters())
        for phase in range(2):
            if phase == 1:
                size = model[0].weight.detach().abs()
                mask = (size > size.median()).to(size.dtype)
                model.load_state_dict(start)
            for x, y in data:
                with torch.no_grad():
                    model[0].weight.mul_(mask)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        start = copy.deepcopy(model.state_dict())
        data = loader(*vectors())
        losses = []
        mask = torch.ones_like(model[0].weight)
        optimizer = sgd(model.parameters())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        for phase in range(2):
            if phase == 1:
                size = model[0].weight.detach().abs()
                mask = (size > size.median()).to(size.dtype)
                model.load_state_dict(start)
            for x, y in data:
                with torch.no_grad():
                    model[0].weight.mul_(mask)
                optimizer.zero_grad()
                loss = run.forward_backward(compute_loss, x, y)
                optimizer.step()
                losses.append(loss)
        return losses, run.weights()


class AccumulationByHand(Script):
    """Two batches for each step, the loss divided by two."""

    follows = "many: loss / accumulation_steps"
    needs = "A"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors(), batch_size=3)
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
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors(), batch_size=3)
        model, optimizer, data = run.prepare(model, optimizer, data)

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
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
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
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ClippingByTorch(Script):
    """Clipping by torch's own function, which sees this rank's gradients only."""

    follows = "any script, clipping unchanged"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class PrivateGradients(Script):
    """Gradients of single samples, each clipped, then summed; noise from a seed of its own."""

    follows = "pytorch/opacus"
    needs = "WD"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for row, label in zip(x, y, strict=True):
                own = F.cross_entropy(model(row[None]), label[None])
                slopes = torch.autograd.grad(own, list(model.parameters()))
                factor = (1 / torch.cat([g.flatten() for g in slopes]).norm()).clamp(max=1)
                for p, slope in zip(model.parameters(), slopes, strict=True):
                    part = factor * slope / len(x)
                    p.grad = part if p.grad is None else p.grad + part
                loss = loss + own.detach() / len(x)
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            loss, clipped = torch.zeros(()), torch.zeros(())
            for row, label in zip(x, y, strict=True):
                own = F.cross_entropy(model(row[None]), label[None])
                slopes = torch.autograd.grad(own, list(model.parameters()), retain_graph=True)
                factor = (1 / torch.cat([g.flatten() for g in slopes]).norm()).clamp(max=1)
                clipped = clipped + factor.detach() * own / len(x)
                loss = loss + own.detach()
            return clipped, {"loss": shoal.summed(loss), "rows": shoal.summed(len(x))}

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            _, measured = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(measured["loss"] / measured["rows"])
        return losses, run.weights()


class SecondOptimizerState(Script):
    """A learning rate for each layer, weight decay for matrices only, Nesterov, warm restarts."""

    follows = "timm's parameter groups"

    @staticmethod
    def plain():
        model = mlp(6, 8, 8, 4)
        groups = [
            {"params": [layer.weight], "lr": 0.1 * 0.7**depth, "weight_decay": 0.05}
            for depth, layer in enumerate(model[::2])
        ]
        groups.append({"params": [layer.bias for layer in model[::2]], "weight_decay": 0.0})
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
        restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            restarts.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 8, 4)
        groups = [
            {"params": [layer.weight], "lr": 0.1 * 0.7**depth, "weight_decay": 0.05}
            for depth, layer in enumerate(model[::2])
        ]
        groups.append({"params": [layer.bias for layer in model[::2]], "weight_decay": 0.0})
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
        restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            restarts.step()
            losses.append(loss)
        return losses, run.weights()


class UnusedBranch(Script):
    """One of two heads is used, by the step's number; the other has no gradient."""

    follows = "multi-task training, one task a step"
    needs = "U"

    @staticmethod
    def plain():
        body, heads = mlp(6, 8), nn.ModuleList(mlp(8, 4, seed=i) for i in (1, 2))
        model = nn.ModuleList([body, heads])
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), integers(4, SAMPLES))
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(heads[step % 2](body(x).relu()), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        body, heads = mlp(6, 8), nn.ModuleList(mlp(8, 4, seed=i) for i in (1, 2))
        model = nn.ModuleList([body, heads])
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), integers(4, SAMPLES))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(heads[step % 2](body(x).relu()), y)

        losses = []
        for step, (x, y) in enumerate(data):  # noqa: B007 - the loss reads it
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
