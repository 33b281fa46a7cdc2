"""Scripts that save, load, resume, evaluate and edit an optimizer's state by themselves."""

from __future__ import annotations

import copy
import io
from collections import defaultdict

import torch
import torch.nn.functional as F

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import loader, mlp, vectors
from tests.scripts.script import Script, weights


class SavedModule(OneLossScript):
    """Saves the module itself after training, loads the file, and evaluates what was loaded."""

    follows = "pytorch.org saving and loading models"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        if step == 2:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            losses.append(loaded(torch.ones(2, 6)).sum().detach())


class ResumedInPlace(OneLossScript):
    """Saves weights and moments to a file after a step, and goes back to it after the next."""

    follows = "pytorch.org general checkpoint"
    needs = "W"

    def setup(self):
        model = mlp(6, 8, 4)
        self.file = io.BytesIO()
        return parts(model, loader(*vectors()))

    def after_step(self, step, model, optimizer, losses):
        if step == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.file
            )
        if step == 1:
            self.file.seek(0)
            self.state = torch.load(self.file)
            model.load_state_dict(self.state["model"])
            optimizer.load_state_dict(self.state["optimizer"])


class ResumedByRun(Script):
    """As ResumedInPlace, by what the run keeps."""

    follows = "pytorch.org general checkpoint"
    needs = "W"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 0:
                state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if step == 1:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            if step == 0:
                state = copy.deepcopy(run.state())
            if step == 1:
                run.load_state(*state)
        return losses, run.weights()


class ForgottenMoments(OneLossScript):
    """Clears the optimizer's state between two phases."""

    follows = "stable-baselines resets"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        if step == 0:
            optimizer.state.clear()


class ReplacedMoments(OneLossScript):
    """Gives the optimizer another state between two phases."""

    follows = "Lookahead, Reptile"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        if step == 0:
            optimizer.state = defaultdict(dict)


class LoggedMoments(OneLossScript):
    """Logs the norm of all momenta."""

    follows = "nanoGPT-like diagnostics"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        losses.append(sum(s["momentum_buffer"].norm() for s in optimizer.state.values()))


class RedrawnHead(OneLossScript):
    """Draws the last layer anew after the first step, under a seed."""

    follows = "warm restarts, primacy bias"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        if step == 0:
            torch.manual_seed(5)
            model[-1].reset_parameters()


class NoisyWeights(OneLossScript):
    """Adds noise to the weights after each step, under a seed of its own."""

    follows = "SGLD"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


class ScaledGradients(Script):
    """Scales the loss by torch's GradScaler."""

    follows = "torch.amp recipe"
    needs = "W"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
        scaler = torch.amp.GradScaler("cpu")
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = scaler.scale(F.cross_entropy(model(x), y))
            loss.backward()
            scaler.step(optimizer)
            losses.append(loss / scaler.get_scale())
            scaler.update()
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))
        scaler = torch.amp.GradScaler("cpu")

        def compute_loss(x, y):
            return scaler.scale(F.cross_entropy(model(x), y))

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            scaler.step(optimizer)
            losses.append(loss / scaler.get_scale())
            scaler.update()
        return losses, run.weights()


class NormOfGroups(OneLossScript):
    """Logs the norm of all gradients, by the optimizer's groups."""

    follows = "fairseq trainer"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        norms = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        losses.append(torch.stack(norms).norm())


class LoadedByRankZero(Script):
    """Goes back to the first weights after a step; one rank alone has the file."""

    follows = "imagenet example"
    needs = "W"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
        start = copy.deepcopy(model.state_dict())
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 0:
                model.load_state_dict(start)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))
        start = copy.deepcopy(run.weights())

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            if step == 0 and run.rank == 0:
                model.load_state_dict(start)
        return losses, run.weights()


class CopiedOptimizer(OneLossScript):
    """Takes a trial step with a copy of the optimizer."""

    follows = "lookahead line search"
    needs = "W"

    def after_step(self, step, model, optimizer, losses):
        if step == 0:
            copied = copy.deepcopy(optimizer)
            losses.append(torch.as_tensor(float(len(copied.param_groups))))


class BestWeights(OneLossScript):
    """Keeps the weights of the lowest validation loss, by its own loop in evaluation mode."""

    follows = "timm, Keras ModelCheckpoint"
    needs = "W"

    def setup(self):
        self.best, self.lowest = None, float("inf")
        return super().setup()

    def after_step(self, step, model, optimizer, losses):
        x, y = vectors()
        model.eval()
        with torch.no_grad():
            score = F.cross_entropy(model(x), y)
        model.train()
        losses.append(score)
        if score < self.lowest:
            self.best, self.lowest = copy.deepcopy(model.state_dict()), score
        if step == 2:
            model.load_state_dict(self.best)
