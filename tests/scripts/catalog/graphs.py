"""Networks over graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, integers, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


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


class SampledGraph(OneLossScript):
    """Batches of target nodes with sampled neighbours, whose features are looked up."""

    follows = "PyG GraphSAGE"
    needs = "V"

    def setup(self):
        model = mlp(12, 8, 4)
        self.nodes, self.labels = normal(30, 6), integers(4, 30)
        return parts(model, loader(integers(30, SAMPLES), integers(30, SAMPLES, 5, seed=2)))

    def loss(self, model, target, neighbours):
        features = torch.cat([self.nodes[target], self.nodes[neighbours].mean(1)], 1)
        return F.cross_entropy(model(features), self.labels[target])
