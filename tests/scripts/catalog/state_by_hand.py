"""Scripts that save, load, resume, evaluate and edit an optimizer's state by themselves."""

from __future__ import annotations

import copy
import io
from collections import defaultdict

import torch
import torch.nn.functional as F

from tests.scripts.samples import loader, mlp, sgd, vectors
from tests.scripts.script import Script, weights


class SavedModule(Script):
    """Saves the module itself after training, loads the file, and evaluates what was loaded."""

    follows = "pytorch.org saving and loading models"
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
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        losses.append(loaded(torch.ones(2, 6)).sum().detach())
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
            optimizer.step()
            losses.append(loss)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        losses.append(loaded(torch.ones(2, 6)).sum().detach())
        return losses, run.weights()


class ResumedInPlace(Script):
    """Saves weights and moments to a file after a step, and goes back to it after the next."""

    follows = "pytorch.org general checkpoint"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        file = io.BytesIO()
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            if step == 1:
                file.seek(0)
                state = torch.load(file)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)
        file = io.BytesIO()

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            if step == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            if step == 1:
                file.seek(0)
                state = torch.load(file)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
        return losses, run.weights()


class ResumedByRun(Script):
    """As ResumedInPlace, by what the run keeps."""

    follows = "pytorch.org general checkpoint"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
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
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

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


class ForgottenMoments(Script):
    """Clears the optimizer's state between two phases."""

    follows = "stable-baselines resets"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 0:
                optimizer.state.clear()
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
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            if step == 0:
                optimizer.state.clear()
        return losses, run.weights()


class ReplacedMoments(Script):
    """Gives the optimizer another state between two phases."""

    follows = "Lookahead, Reptile"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 0:
                optimizer.state = defaultdict(dict)
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
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            if step == 0:
                optimizer.state = defaultdict(dict)
        return losses, run.weights()


class LoggedMoments(Script):
    """Logs the norm of all momenta."""

    follows = "nanoGPT-like diagnostics"
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
            losses.append(sum(s["momentum_buffer"].norm() for s in optimizer.state.values()))
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
            optimizer.step()
            losses.append(loss)
            losses.append(sum(s["momentum_buffer"].norm() for s in optimizer.state.values()))
        return losses, run.weights()


class RedrawnHead(Script):
    """Draws the last layer anew after the first step, under a seed."""

    follows = "warm restarts, primacy bias"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 0:
                torch.manual_seed(5)
                model[-1].reset_parameters()
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
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            if step == 0:
                torch.manual_seed(5)
                model[-1].reset_parameters()
        return losses, run.weights()


class NoisyWeights(Script):
    """Adds noise to the weights after each step, under a seed of its own."""

    follows = "SGLD"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            torch.manual_seed(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
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
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            torch.manual_seed(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
        return losses, run.weights()


class ScaledGradients(Script):
    """Scales the loss by torch's GradScaler."""

    follows = "torch.amp recipe"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
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
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)
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


class NormOfGroups(Script):
    """Logs the norm of all gradients, by the optimizer's groups."""

    follows = "fairseq trainer"
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
            norms = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
            losses.append(torch.stack(norms).norm())
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
            optimizer.step()
            losses.append(loss)
            norms = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
            losses.append(torch.stack(norms).norm())
        return losses, run.weights()


class LoadedByRankZero(Script):
    """Goes back to the first weights after a step; one rank alone has the file."""

    follows = "imagenet example"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
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
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)
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


class CopiedOptimizer(Script):
    """Takes a trial step with a copy of the optimizer."""

    follows = "lookahead line search"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 0:
                copied = copy.deepcopy(optimizer)
                losses.append(torch.as_tensor(float(len(copied.param_groups))))
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
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            if step == 0:
                copied = copy.deepcopy(optimizer)
                losses.append(torch.as_tensor(float(len(copied.param_groups))))
        return losses, run.weights()


class BestWeights(Script):
    """Keeps the weights of the lowest validation loss, by its own loop in evaluation mode."""

    follows = "timm, Keras ModelCheckpoint"
    needs = "W"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        best, lowest = None, float("inf")
        held_out, labels = vectors()
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            model.eval()
            with torch.no_grad():
                score = F.cross_entropy(model(held_out), labels)
            model.train()
            losses.append(score)
            if score < lowest:
                best, lowest = copy.deepcopy(model.state_dict()), score
        model.load_state_dict(best)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)
        best, lowest = None, float("inf")
        held_out, labels = vectors()

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            model.eval()
            with torch.no_grad():
                score = F.cross_entropy(model(held_out), labels)
            model.train()
            losses.append(score)
            if score < lowest:
                best, lowest = copy.deepcopy(model.state_dict()), score
        model.load_state_dict(best)
        return losses, run.weights()
