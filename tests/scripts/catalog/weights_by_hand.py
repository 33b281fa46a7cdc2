"""Scripts that average or mask weights."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import loader, mlp, sgd, vectors
from tests.scripts.script import Script, weights


class WeightAverage(OneLossScript):
    """Stochastic weight averaging with torch's own class, evaluated at the end."""

    follows = "torch.optim.swa_utils"
    needs = "T"

    def setup(self):
        model = mlp(6, 8, 4)
        self.average = torch.optim.swa_utils.AveragedModel(model)
        return parts(model, loader(*vectors()))

    def after_step(self, step, model, optimizer, losses):
        self.average.update_parameters(model)
        losses.append(self.average(torch.ones(1, 6)).sum())


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
