"""Behaviour learnt inside of a learnt world."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.samples import SAMPLES, built, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


class WorldModel(nn.Module):
    """Predicts the next state and the reward from a state and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.state, self.reward = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(torch.cat([state, action], 1)).tanh()
        return self.state(h), self.reward(h).squeeze(1)


class Imagination(Script):
    """A world model, and a policy and a value that learn in its imagination; three optimizers."""

    follows = "NM512/dreamerv3-torch"
    needs = "MOS"

    @staticmethod
    def plain():
        world, policy, value = built(WorldModel), mlp(3, 8, 2, seed=1), mlp(3, 8, 1, seed=2)
        steps = [sgd(part.parameters(), 0.02) for part in (world, policy, value)]
        data = loader(normal(SAMPLES, 3), normal(SAMPLES, 2, seed=1), normal(SAMPLES, 4, seed=2))
        losses = []
        for state, action, after in data:
            following, reward = world(state, action)
            loss_w = F.mse_loss(following, after[:, :3]) + F.mse_loss(reward, after[:, 3])
            steps[0].zero_grad()
            loss_w.backward()
            steps[0].step()
            dreamt, total = state, 0
            for _ in range(2):
                dreamt, reward = world(dreamt, policy(dreamt).tanh())
                total = total + reward
            loss_p = -(total + value(dreamt).squeeze(1)).mean()
            steps[1].zero_grad()
            loss_p.backward()
            steps[1].step()
            loss_v = F.mse_loss(value(state).squeeze(1), total.detach())
            steps[2].zero_grad()
            loss_v.backward()
            steps[2].step()
            losses += [loss_w, loss_p, loss_v]
        return losses, weights(world, policy, value)

    @staticmethod
    def with_shoal(run):
        world, policy, value = built(WorldModel), mlp(3, 8, 2, seed=1), mlp(3, 8, 1, seed=2)
        steps = [sgd(part.parameters(), 0.02) for part in (world, policy, value)]
        data = loader(normal(SAMPLES, 3), normal(SAMPLES, 2, seed=1), normal(SAMPLES, 4, seed=2))
        world, policy, value, *steps, data = run.prepare(world, policy, value, *steps, data)

        def world_loss(state, action, after):
            following, reward = world(state, action)
            return F.mse_loss(following, after[:, :3]) + F.mse_loss(reward, after[:, 3])

        def policy_loss(state):
            dreamt, total = state, 0
            for _ in range(2):
                dreamt, reward = world(dreamt, policy(dreamt).tanh())
                total = total + reward
            return -(total + value(dreamt).squeeze(1)).mean(), total

        def value_loss(state, total):
            return F.mse_loss(value(state).squeeze(1), total)

        losses = []
        for state, action, after in data:
            steps[0].zero_grad()
            loss_w = run.forward_backward(world_loss, state, action, after)
            steps[0].step()
            steps[1].zero_grad()
            loss_p, total = run.forward_backward(policy_loss, state)
            steps[1].step()
            steps[2].zero_grad()
            loss_v = run.forward_backward(value_loss, state, total)
            steps[2].step()
            losses += [loss_w, loss_p, loss_v]
        return losses, run.weights()
