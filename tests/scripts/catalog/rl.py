"""Reinforcement learning, with rollouts from a small deterministic environment."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.samples import SAMPLES, built, integers, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


class Reinforce(Script):
    """Log-probabilities of a whole episode times its returns, normalised over the episode."""

    follows = "pytorch/examples reinforcement_learning/reinforce.py"
    needs = "NSU"

    @staticmethod
    def plain():
        policy = mlp(3, 8, 2)
        optimizer = sgd(policy.parameters())
        losses = []
        for episode in range(3):
            states, actions, rewards = _episode(episode)
            returns = rewards.flip(0).cumsum(0).flip(0)
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            chosen = policy(states).log_softmax(1)[torch.arange(len(states)), actions]
            loss = -(chosen * returns).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(policy)

    @staticmethod
    def with_shoal(run):
        policy = mlp(3, 8, 2)
        optimizer = sgd(policy.parameters())
        policy, optimizer = run.prepare(policy, optimizer)

        def compute_loss(states, actions, returns):
            chosen = policy(states).log_softmax(1)[torch.arange(len(states)), actions]
            return shoal.counted(-(chosen * returns).sum(), len(states) / length)

        losses = []
        for episode in range(3):
            states, actions, rewards = _episode(episode)
            returns = rewards.flip(0).cumsum(0).flip(0)
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            length = len(states)
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, *run.share((states, actions, returns)))
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


def _episode(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, actions and rewards of an episode; later ones are longer."""
    length = 5 + 2 * number
    return (
        normal(length, 3, seed=number),
        integers(2, length, seed=number),
        normal(length, seed=number + 9),
    )


class DeepQ(Script):
    """Samples from a replay buffer, a target network that is copied now and then, Huber's loss."""

    follows = "CleanRL dqn.py"
    needs = "NTS"

    @staticmethod
    def plain():
        network = mlp(3, 8, 2)
        target = copy.deepcopy(network)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01, eps=1e-3)
        states, actions, rewards, successors = _replay()
        losses = []
        for step in range(3):
            rows = integers(40, 7, seed=step)
            with torch.no_grad():
                goal = rewards[rows] + 0.9 * target(successors[rows]).max(1).values
            value = network(states[rows]).gather(1, actions[rows, None]).squeeze(1)
            loss = F.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 2 == 0:
                target.load_state_dict(network.state_dict())
            losses.append(loss)
        return losses, weights(network)

    @staticmethod
    def with_shoal(run):
        network = mlp(3, 8, 2)
        target = copy.deepcopy(network)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01, eps=1e-3)
        states, actions, rewards, successors = _replay()
        network, optimizer = run.prepare(network, optimizer)

        def compute_loss(rows):
            with torch.no_grad():
                goal = rewards[rows] + 0.9 * target(successors[rows]).max(1).values
            value = network(states[rows]).gather(1, actions[rows, None]).squeeze(1)
            return F.smooth_l1_loss(value, goal)

        losses = []
        for step in range(3):
            rows = run.share(integers(40, 7, seed=step))
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, rows)
            optimizer.step()
            if step % 2 == 0:
                target.load_state_dict(run.weights())
            losses.append(loss)
        return losses, run.weights()


def _replay() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return normal(40, 3), integers(2, 40), normal(40, seed=1), normal(40, 3, seed=2)


class ActorCritic(nn.Module):
    """A policy and a value over one trunk, called by method."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def act(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of the actions, entropies and values."""
        h = self.trunk(states).tanh()
        logs = self.policy(h).log_softmax(1)
        chosen = logs.gather(1, actions[:, None]).squeeze(1)
        return chosen, -(logs.exp() * logs).sum(1), self.value(h).squeeze(1)


class ProximalPolicy(Script):
    """Clipped ratios over minibatches of a rollout; advantages normalised over each minibatch."""

    follows = "CleanRL ppo.py"
    needs = "NGSX"

    @staticmethod
    def plain():
        agent = built(ActorCritic)
        optimizer = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-3)
        states, actions, advantages, returns = _rollout()
        with torch.no_grad():
            before = agent.act(states, actions)[0]
        losses = []
        for rows in torch.randperm(21, generator=torch.Generator().manual_seed(3)).split(7):
            now, entropy, value = agent.act(states[rows], actions[rows])
            ratio = (now - before[rows]).exp()
            gain = advantages[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            value_loss = 0.5 * (value - returns[rows]).pow(2).mean()
            loss = policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            losses.append(loss)
        return losses, weights(agent)

    @staticmethod
    def with_shoal(run):
        agent = built(ActorCritic)
        optimizer = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-3)
        states, actions, advantages, returns = _rollout()
        with torch.no_grad():
            before = agent.act(states, actions)[0]
        agent, optimizer = run.prepare(agent, optimizer)

        def compute_loss(rows, gain):
            now, entropy, value = agent.act(states[rows], actions[rows])
            ratio = (now - before[rows]).exp()
            policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            value_loss = 0.5 * (value - returns[rows]).pow(2).mean()
            return policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss

        losses = []
        for rows in torch.randperm(21, generator=torch.Generator().manual_seed(3)).split(7):
            gain = advantages[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, *run.share((rows, gain)))
            run.clip_gradients(0.5)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


def _rollout() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return normal(21, 3), integers(2, 21), normal(21, seed=1), normal(21, seed=2)


class SoftActorCritic(Script):
    """Two critics, a policy and a temperature, an optimizer for each; slow targets."""

    follows = "CleanRL sac_continuous_action.py"
    needs = "MOT"

    @staticmethod
    def plain():
        actor, critics = mlp(3, 8, 2), nn.ModuleList(mlp(5, 8, 1, seed=i) for i in (1, 2))
        targets = copy.deepcopy(critics)
        temperature = nn.Embedding.from_pretrained(torch.zeros(1, 1), freeze=False)
        step_a, step_c = sgd(actor.parameters(), 0.02), sgd(critics.parameters(), 0.02)
        step_t = sgd(temperature.parameters(), 0.02)
        data = loader(normal(SAMPLES, 3), normal(SAMPLES, 2, seed=1), normal(SAMPLES, seed=2))
        losses = []
        for state, action, reward in data:
            alpha = temperature.weight.exp().item()
            with torch.no_grad():
                after = torch.cat([state, actor(state).tanh()], 1)
                goal = reward + 0.9 * torch.min(*(t(after) for t in targets)).squeeze(1) - alpha
            both = [c(torch.cat([state, action], 1)).squeeze(1) for c in critics]
            loss_c = sum(F.mse_loss(value, goal) for value in both)
            step_c.zero_grad()
            loss_c.backward()
            step_c.step()
            move = actor(state).tanh()
            worst = torch.min(*(c(torch.cat([state, move], 1)) for c in critics)).squeeze(1)
            loss_a = (alpha * move.pow(2).sum(1) - worst).mean()
            step_a.zero_grad()
            loss_a.backward()
            step_a.step()
            entropy = move.detach().pow(2).sum(1)
            loss_t = (temperature.weight.exp() * (entropy - 1)).mean()
            step_t.zero_grad()
            loss_t.backward()
            step_t.step()
            with torch.no_grad():
                for mean, new in zip(targets.parameters(), critics.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
            losses += [loss_c, loss_a, loss_t]
        return losses, weights(actor, critics, temperature)

    @staticmethod
    def with_shoal(run):
        actor, critics = mlp(3, 8, 2), nn.ModuleList(mlp(5, 8, 1, seed=i) for i in (1, 2))
        targets = copy.deepcopy(critics)
        temperature = nn.Embedding.from_pretrained(torch.zeros(1, 1), freeze=False)
        step_a, step_c = sgd(actor.parameters(), 0.02), sgd(critics.parameters(), 0.02)
        step_t = sgd(temperature.parameters(), 0.02)
        data = loader(normal(SAMPLES, 3), normal(SAMPLES, 2, seed=1), normal(SAMPLES, seed=2))
        actor, critics, temperature, step_a, step_c, step_t, data = run.prepare(
            actor, critics, temperature, step_a, step_c, step_t, data
        )
        now = torch.zeros(1, dtype=torch.long)

        def critics_loss(state, action, reward):
            alpha = temperature(now).exp().item()
            with torch.no_grad():
                after = torch.cat([state, actor(state).tanh()], 1)
                goal = reward + 0.9 * torch.min(*(t(after) for t in targets)).squeeze(1) - alpha
            both = [c(torch.cat([state, action], 1)).squeeze(1) for c in critics]
            return sum(F.mse_loss(value, goal) for value in both)

        def actor_loss(state):
            alpha = temperature(now).exp().item()
            move = actor(state).tanh()
            worst = torch.min(*(c(torch.cat([state, move], 1)) for c in critics)).squeeze(1)
            return (alpha * move.pow(2).sum(1) - worst).mean(), move

        def temperature_loss(move):
            entropy = move.detach().pow(2).sum(1)
            return (temperature(now).exp() * (entropy - 1)).mean()

        losses = []
        for state, action, reward in data:
            step_c.zero_grad()
            loss_c = run.forward_backward(critics_loss, state, action, reward)
            step_c.step()
            step_a.zero_grad()
            loss_a, move = run.forward_backward(actor_loss, state)
            step_a.step()
            step_t.zero_grad()
            loss_t = run.forward_backward(temperature_loss, move, rows=len(move))
            step_t.step()
            with torch.no_grad():
                for mean, new in zip(targets.parameters(), critics.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
            losses += [loss_c, loss_a, loss_t]
        return losses, run.weights()
