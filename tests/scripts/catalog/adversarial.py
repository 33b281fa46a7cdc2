"""Generators against discriminators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.samples import SAMPLES, loader, mlp, normal, sgd
from tests.scripts.script import Script, draw_as_rank_0, weights


class Dcgan(Script):
    """D and G in turn, each with an optimizer; the latents come with the data."""

    follows = "pytorch/examples dcgan"
    needs = "MO"

    @staticmethod
    def plain():
        generator, critic = mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters()), sgd(critic.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        bce = nn.BCEWithLogitsLoss()
        losses = []
        for real, z in data:
            critic.zero_grad()
            fake = generator(z).detach()
            real_score, fake_score = critic(real), critic(fake)
            loss_d = bce(real_score, torch.ones_like(real_score)) + bce(
                fake_score, torch.zeros_like(fake_score)
            )
            loss_d.backward()
            step_d.step()
            generator.zero_grad()
            score = critic(generator(z))
            loss_g = bce(score, torch.ones_like(score))
            loss_g.backward()
            step_g.step()
            losses += [loss_d, loss_g]
        return losses, weights(generator, critic)

    @staticmethod
    def with_shoal(run):
        generator, critic = mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters()), sgd(critic.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        bce = nn.BCEWithLogitsLoss()
        generator, critic, step_g, step_d, data = run.prepare(
            generator, critic, step_g, step_d, data
        )

        def critic_loss(real, z):
            fake = generator(z).detach()
            real_score, fake_score = critic(real), critic(fake)
            return bce(real_score, torch.ones_like(real_score)) + bce(
                fake_score, torch.zeros_like(fake_score)
            )

        def generator_loss(z):
            score = critic(generator(z))
            return bce(score, torch.ones_like(score))

        losses = []
        for real, z in data:
            critic.zero_grad()
            loss_d = run.forward_backward(critic_loss, real, z)
            step_d.step()
            generator.zero_grad()
            loss_g = run.forward_backward(generator_loss, z)
            step_g.step()
            losses += [loss_d, loss_g]
        return losses, run.weights()


class DcganDrawn(Script):
    """The same with latents drawn in the loss: ranks draw numbers of their own."""

    follows = "pytorch/examples dcgan, latents drawn in the loop"
    needs = "MOR"

    @staticmethod
    def plain():
        generator, critic = mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters()), sgd(critic.parameters())
        data = loader(normal(SAMPLES, 6))
        draw_as_rank_0()
        losses = []
        for (real,) in data:
            critic.zero_grad()
            fake = generator(torch.randn(len(real), 3)).detach()
            loss_d = (F.softplus(-critic(real)) + F.softplus(critic(fake))).mean()
            loss_d.backward()
            step_d.step()
            generator.zero_grad()
            loss_g = F.softplus(-critic(generator(torch.randn(len(real), 3)))).mean()
            loss_g.backward()
            step_g.step()
            losses += [loss_d, loss_g]
        return losses, weights(generator, critic)

    @staticmethod
    def with_shoal(run):
        generator, critic = mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters()), sgd(critic.parameters())
        data = loader(normal(SAMPLES, 6))
        generator, critic, step_g, step_d, data = run.prepare(
            generator, critic, step_g, step_d, data
        )

        def critic_loss(real):
            fake = generator(torch.randn(len(real), 3)).detach()
            return (F.softplus(-critic(real)) + F.softplus(critic(fake))).mean()

        def generator_loss(real):
            return F.softplus(-critic(generator(torch.randn(len(real), 3)))).mean()

        losses = []
        for (real,) in data:
            critic.zero_grad()
            loss_d = run.forward_backward(critic_loss, real)
            step_d.step()
            generator.zero_grad()
            loss_g = run.forward_backward(generator_loss, real)
            step_g.step()
            losses += [loss_d, loss_g]
        return losses, run.weights()


class WassersteinPenalty(Script):
    """A critic with a gradient penalty, two steps for each of the generator's."""

    follows = "caogang/wgan-gp"
    needs = "MOD"

    @staticmethod
    def plain():
        generator, critic = mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters(), 0.05), sgd(critic.parameters(), 0.05)
        mix = normal(SAMPLES, 1, seed=2).sigmoid()
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1), mix)
        losses = []
        for real, z, alpha in data:
            for _ in range(2):
                step_d.zero_grad()
                fake = generator(z).detach()
                between = (alpha * real + (1 - alpha) * fake).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                loss_d = (critic(fake) - critic(real)).mean()
                loss_d = loss_d + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
                loss_d.backward()
                step_d.step()
                losses.append(loss_d)
            step_g.zero_grad()
            loss_g = -critic(generator(z)).mean()
            loss_g.backward()
            step_g.step()
            losses.append(loss_g)
        return losses, weights(generator, critic)

    @staticmethod
    def with_shoal(run):
        generator, critic = mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters(), 0.05), sgd(critic.parameters(), 0.05)
        mix = normal(SAMPLES, 1, seed=2).sigmoid()
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1), mix)
        generator, critic, step_g, step_d, data = run.prepare(
            generator, critic, step_g, step_d, data
        )

        def critic_loss(real, z, alpha):
            fake = generator(z).detach()
            between = (alpha * real + (1 - alpha) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            loss_d = (critic(fake) - critic(real)).mean()
            return loss_d + 10 * (slope.norm(dim=1) - 1).pow(2).mean()

        def generator_loss(z):
            return -critic(generator(z)).mean()

        losses = []
        for real, z, alpha in data:
            for _ in range(2):
                step_d.zero_grad()
                loss_d = run.forward_backward(critic_loss, real, z, alpha)
                step_d.step()
                losses.append(loss_d)
            step_g.zero_grad()
            loss_g = run.forward_backward(generator_loss, z)
            step_g.step()
            losses.append(loss_g)
        return losses, run.weights()


class LazyRegularisation(Script):
    """R1 every second step only, an average of the generator's weights."""

    follows = "rosinality/stylegan2-pytorch"
    needs = "MODT"

    @staticmethod
    def plain():
        generator, average, critic = mlp(3, 8, 6), mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters()), sgd(critic.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        losses = []
        for step, (real, z) in enumerate(data):
            step_d.zero_grad()
            fake = generator(z).detach()
            loss_d = (F.softplus(-critic(real)) + F.softplus(critic(fake))).mean()
            loss_d.backward()
            step_d.step()
            if step % 2 == 0:
                step_d.zero_grad()
                image = real.detach().requires_grad_()
                (slope,) = torch.autograd.grad(critic(image).sum(), image, create_graph=True)
                penalty = slope.pow(2).sum(1).mean()
                penalty.backward()
                step_d.step()
                losses.append(penalty)
            step_g.zero_grad()
            loss_g = F.softplus(-critic(generator(z))).mean()
            loss_g.backward()
            step_g.step()
            with torch.no_grad():
                for mean, new in zip(average.parameters(), generator.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
            losses += [loss_d, loss_g, average(torch.ones(1, 3)).sum()]
        return losses, weights(generator, critic)

    @staticmethod
    def with_shoal(run):
        generator, average, critic = mlp(3, 8, 6), mlp(3, 8, 6), mlp(6, 8, 1, seed=1)
        step_g, step_d = sgd(generator.parameters()), sgd(critic.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        generator, critic, step_g, step_d, data = run.prepare(
            generator, critic, step_g, step_d, data
        )

        def critic_loss(real, z):
            fake = generator(z).detach()
            return (F.softplus(-critic(real)) + F.softplus(critic(fake))).mean()

        def penalty_loss(real):
            image = real.detach().requires_grad_()
            (slope,) = torch.autograd.grad(critic(image).sum(), image, create_graph=True)
            return slope.pow(2).sum(1).mean()

        def generator_loss(z):
            return F.softplus(-critic(generator(z))).mean()

        losses = []
        for step, (real, z) in enumerate(data):
            step_d.zero_grad()
            loss_d = run.forward_backward(critic_loss, real, z)
            step_d.step()
            if step % 2 == 0:
                step_d.zero_grad()
                penalty = run.forward_backward(penalty_loss, real)
                step_d.step()
                losses.append(penalty)
            step_g.zero_grad()
            loss_g = run.forward_backward(generator_loss, z)
            step_g.step()
            with torch.no_grad():
                for mean, new in zip(average.parameters(), generator.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
            losses += [loss_d, loss_g, average(torch.ones(1, 3)).sum()]
        return losses, run.weights()
