"""Physics, molecules, graphs and inner optimisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.samples import SAMPLES, built, integers, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


class Energy(nn.Module):
    """An energy of pairwise distances between the atoms of each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> Tensor:
        i, j = torch.triu_indices(positions.shape[1], positions.shape[1], 1)
        apart = (positions[:, i] - positions[:, j]).norm(dim=-1, keepdim=True)
        return self.pair(apart).sum((1, 2))


class Forces(Script):
    """Forces are the gradient of the energy; the loss takes both."""

    follows = "atomistic-machine-learning/schnetpack"
    needs = "D"

    @staticmethod
    def plain():
        model = built(Energy)
        optimizer = sgd(model.parameters(), 0.001)
        data = loader(normal(SAMPLES, 4, 3), normal(SAMPLES, seed=1), normal(SAMPLES, 4, 3, seed=2))
        losses = []
        for positions, energy, forces in data:
            optimizer.zero_grad()
            positions.requires_grad_()
            guess = model(positions)
            (slope,) = torch.autograd.grad(guess.sum(), positions, create_graph=True)
            loss = F.mse_loss(guess, energy) + 10 * F.mse_loss(-slope, forces)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Energy)
        optimizer = sgd(model.parameters(), 0.001)
        data = loader(normal(SAMPLES, 4, 3), normal(SAMPLES, seed=1), normal(SAMPLES, 4, 3, seed=2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(positions, energy, forces):
            positions.requires_grad_()
            guess = model(positions)
            (slope,) = torch.autograd.grad(guess.sum(), positions, create_graph=True)
            return F.mse_loss(guess, energy) + 10 * F.mse_loss(-slope, forces)

        losses = []
        for positions, energy, forces in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, positions, energy, forces)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class PhysicsInformed(Script):
    """A differential equation by second derivatives on points, and values on its boundary."""

    follows = "maziarraissi/PINNs"
    needs = "DN"

    @staticmethod
    def plain():
        model = mlp(1, 8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            x = points.clone().requires_grad_()
            u = model(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            loss = (second + u).pow(2).mean() + model(border).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(1, 8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(points):
            x = points.clone().requires_grad_()
            u = model(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            return (second + u).pow(2).mean() + model(border).pow(2).mean()

        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, run.share(points))
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class PhysicsLbfgs(Script):
    """The same equation by L-BFGS, which calls a closure several times in each step."""

    follows = "maziarraissi/PINNs, after Adam"
    needs = "DNO"

    @staticmethod
    def plain():
        model = mlp(1, 8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])

        def closure():
            optimizer.zero_grad()
            x = points.clone().requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            loss = (slope - u).pow(2).mean() + (model(border) - 1).pow(2).mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(1, 8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(points):
            x = points.clone().requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return (slope - u).pow(2).mean() + (model(border) - 1).pow(2).mean()

        def closure():
            optimizer.zero_grad()
            return run.forward_backward(compute_loss, run.share(points))

        losses = [optimizer.step(closure) for _ in range(3)]
        return losses, run.weights()


class MetaLearning(Script):
    """Inner steps on one half of each task by functional_call, the loss on the other half."""

    follows = "learnables/learn2learn MAML"
    needs = "DX"

    @staticmethod
    def plain():
        model = mlp(2, 8, 1)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6, 2), normal(SAMPLES, 6, 1, seed=1))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for inputs, wanted in zip(x, y, strict=True):
                fast = dict(model.named_parameters())
                error = F.mse_loss(torch.func.functional_call(model, fast, inputs[:3]), wanted[:3])
                slopes = torch.autograd.grad(error, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), slopes, strict=True)}
                after = torch.func.functional_call(model, fast, inputs[3:])
                loss = loss + F.mse_loss(after, wanted[3:]) / len(x)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(2, 8, 1)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6, 2), normal(SAMPLES, 6, 1, seed=1))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            loss = torch.zeros(())
            for inputs, wanted in zip(x, y, strict=True):
                fast = dict(model.named_parameters())
                error = F.mse_loss(torch.func.functional_call(model, fast, inputs[:3]), wanted[:3])
                slopes = torch.autograd.grad(error, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), slopes, strict=True)}
                after = torch.func.functional_call(model, fast, inputs[3:])
                loss = loss + F.mse_loss(after, wanted[3:]) / len(x)
            return loss

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class GraphConvolution(nn.Module):
    """Two rounds of means over neighbours, by a dense adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        h = self.first(links @ nodes).relu()
        return self.second(links @ h)


class FullGraph(Script):
    """One graph is the whole batch: some of its nodes have labels."""

    follows = "pytorch/examples gcn"
    needs = "NCG"

    @staticmethod
    def plain():
        model = built(GraphConvolution)
        optimizer = sgd(model.parameters())
        nodes, links, labels = normal(12, 6), normal(12, 12, seed=1).softmax(1), integers(4, 12)
        known = torch.tensor([0, 1, 2, 5, 6, 9, 11])
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(nodes, links)[known], labels[known])
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(GraphConvolution)
        optimizer = sgd(model.parameters())
        nodes, links, labels = normal(12, 6), normal(12, 12, seed=1).softmax(1), integers(4, 12)
        known = torch.tensor([0, 1, 2, 5, 6, 9, 11])
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(known):
            return F.cross_entropy(model(nodes, links)[known], labels[known])

        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, run.share(known))
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class SampledGraph(Script):
    """Batches of target nodes with sampled neighbours, whose features are looked up."""

    follows = "PyG GraphSAGE"
    needs = "V"

    @staticmethod
    def plain():
        model = mlp(12, 8, 4)
        optimizer = sgd(model.parameters())
        nodes, labels = normal(30, 6), integers(4, 30)
        data = loader(integers(30, SAMPLES), integers(30, SAMPLES, 5, seed=2))
        losses = []
        for target, neighbours in data:
            optimizer.zero_grad()
            features = torch.cat([nodes[target], nodes[neighbours].mean(1)], 1)
            loss = F.cross_entropy(model(features), labels[target])
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(12, 8, 4)
        optimizer = sgd(model.parameters())
        nodes, labels = normal(30, 6), integers(4, 30)
        data = loader(integers(30, SAMPLES), integers(30, SAMPLES, 5, seed=2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(target, neighbours):
            features = torch.cat([nodes[target], nodes[neighbours].mean(1)], 1)
            return F.cross_entropy(model(features), labels[target])

        losses = []
        for target, neighbours in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, target, neighbours)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class Experts(nn.Module):
    """Two experts of four for each token; returns the logits and what balances the load."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, and for each token the probabilities and the choices of experts."""
        h = self.embedding(tokens)
        chances = self.router(h).softmax(-1)
        weight, chosen = chances.topk(2, dim=-1)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).any(-1)
            if where.any():
                share = (weight * (chosen == number)).sum(-1)[where]
                mixed[where] = mixed[where] + share[:, None] * expert(h[where])
        choices = F.one_hot(chosen, 4).sum(-2).to(h.dtype)
        return self.head(h + mixed), chances, choices


class ExpertsPlain(Script):
    """Tokens choose their experts; some experts get none on some ranks."""

    follows = "transformers Mixtral, without balance loss"
    needs = "U"

    @staticmethod
    def plain():
        model = built(Experts)
        optimizer = sgd(model.parameters())
        data = loader(integers(12, SAMPLES, 3), integers(12, SAMPLES, 3, seed=2))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            logits, _, _ = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Experts)
        optimizer = sgd(model.parameters())
        data = loader(integers(12, SAMPLES, 3), integers(12, SAMPLES, 3, seed=2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            logits, _, _ = model(x)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ExpertsBalanced(Script):
    """The load of the experts is balanced over the global batch: a product of two means."""

    follows = "Switch Transformer, transformers Mixtral"
    needs = "GUC"

    @staticmethod
    def plain():
        model = built(Experts)
        optimizer = sgd(model.parameters())
        data = loader(integers(12, SAMPLES, 3), integers(12, SAMPLES, 3, seed=2))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            logits, chances, choices = model(x)
            load = choices.mean((0, 1))
            balance = 4 * (load * chances.mean((0, 1))).sum()
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * balance
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Experts)
        optimizer = sgd(model.parameters())
        data = loader(integers(12, SAMPLES, 3), integers(12, SAMPLES, 3, seed=2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            logits, chances, choices = model(x)
            load = run.gather(choices).mean((0, 1))
            balance = 4 * (load * chances.mean((0, 1))).sum()
            return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * balance

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ExpertsForgotten(Script):
    """The same without gathering: each rank would balance its own tokens."""

    follows = "transformers Mixtral, unchanged"
    needs = "GUC"

    plain = ExpertsBalanced.plain

    @staticmethod
    def with_shoal(run):
        model = built(Experts)
        optimizer = sgd(model.parameters())
        data = loader(integers(12, SAMPLES, 3), integers(12, SAMPLES, 3, seed=2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            logits, chances, choices = model(x)
            load = choices.mean((0, 1))
            balance = 4 * (load * chances.mean((0, 1))).sum()
            return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * balance

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
