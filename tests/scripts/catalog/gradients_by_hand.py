"""Scripts that change gradients before the step."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shoal
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import loader, mlp, vectors
from tests.scripts.script import Script, weights


class LayerwiseRates(OneLossScript):
    """Each gradient is scaled by the norms of its weight and of itself before the step."""

    follows = "LARS in MLPerf"
    needs = "W"

    def setup(self):
        return parts(mlp(6, 8, 4), loader(*vectors()), lr=1.0)

    def before_step(self, step, model, optimizer):
        optimizer.param_groups[0]["lr"] = (step + 1) / 3
        with torch.no_grad():
            for p in model.parameters():
                p.grad.mul_(0.05 * p.norm() / (p.grad.norm() + 1e-4 * p.norm()))


class ConflictingTasks(Script):
    """Gradients of two tasks are projected on each other and combined by hand."""

    follows = "tianheyu927/PCGrad"
    needs = "WE"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
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
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))

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


class PrivateGradients(Script):
    """Gradients of single samples, each clipped, then summed; noise from a seed of its own."""

    follows = "pytorch/opacus"
    needs = "WD"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
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
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))

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
