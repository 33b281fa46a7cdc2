"""Generators against discriminators, and models trained against their own worst inputs."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.samples import SAMPLES, cnn, images, loader, mlp, normal, sgd, vectors
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


class CycleConsistency(Script):
    """Two generators under one optimizer, two critics, a buffer of old images."""

    follows = "junyanz/pytorch-CycleGAN-and-pix2pix"
    needs = "MOS"

    @staticmethod
    def plain():
        there, back = mlp(6, 8, 6), mlp(6, 8, 6, seed=1)
        critic_a, critic_b = mlp(6, 8, 1, seed=2), mlp(6, 8, 1, seed=3)
        step_g = sgd(itertools.chain(there.parameters(), back.parameters()), 0.05)
        step_d = sgd(itertools.chain(critic_a.parameters(), critic_b.parameters()), 0.05)
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        losses, old = [], None
        for a, b in data:
            step_g.zero_grad()
            fake_b, fake_a = there(a), back(b)
            cycle = (back(fake_b) - a).abs().mean() + (there(fake_a) - b).abs().mean()
            fooled = (critic_b(fake_b) - 1).pow(2).mean() + (critic_a(fake_a) - 1).pow(2).mean()
            loss_g = fooled + 10 * cycle
            loss_g.backward()
            step_g.step()
            step_d.zero_grad()
            past_a, past_b = (fake_a.detach(), fake_b.detach()) if old is None else old
            past_a, past_b = past_a[: len(a)], past_b[: len(b)]
            loss_d = (critic_a(a) - 1).pow(2).mean() + critic_a(past_a).pow(2).mean()
            loss_d = loss_d + (critic_b(b) - 1).pow(2).mean() + critic_b(past_b).pow(2).mean()
            loss_d.backward()
            step_d.step()
            old = fake_a.detach(), fake_b.detach()
            losses += [loss_g, loss_d]
        return losses, weights(there, back, critic_a, critic_b)

    @staticmethod
    def with_shoal(run):
        there, back = mlp(6, 8, 6), mlp(6, 8, 6, seed=1)
        critic_a, critic_b = mlp(6, 8, 1, seed=2), mlp(6, 8, 1, seed=3)
        step_g = sgd(itertools.chain(there.parameters(), back.parameters()), 0.05)
        step_d = sgd(itertools.chain(critic_a.parameters(), critic_b.parameters()), 0.05)
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        there, back, critic_a, critic_b, step_g, step_d, data = run.prepare(
            there, back, critic_a, critic_b, step_g, step_d, data
        )

        def generators_loss(a, b):
            fake_b, fake_a = there(a), back(b)
            cycle = (back(fake_b) - a).abs().mean() + (there(fake_a) - b).abs().mean()
            fooled = (critic_b(fake_b) - 1).pow(2).mean() + (critic_a(fake_a) - 1).pow(2).mean()
            return fooled + 10 * cycle, (fake_a, fake_b)

        def critics_loss(a, b, past_a, past_b):
            loss_d = (critic_a(a) - 1).pow(2).mean() + critic_a(past_a).pow(2).mean()
            return loss_d + (critic_b(b) - 1).pow(2).mean() + critic_b(past_b).pow(2).mean()

        losses, old = [], None
        for a, b in data:
            step_g.zero_grad()
            loss_g, fakes = run.forward_backward(generators_loss, a, b)
            step_g.step()
            step_d.zero_grad()
            # The buffer is of global batches: their rows belong to other ranks in a smaller batch.
            fakes = run.gather(fakes[0]), run.gather(fakes[1])
            past_a, past_b = fakes if old is None else old
            total = len(run.gather(a))
            past_a, past_b = past_a[:total][run.rows], past_b[:total][run.rows]
            loss_d = run.forward_backward(critics_loss, a, b, past_a, past_b)
            step_d.step()
            old = fakes
            losses += [loss_g, loss_d]
        return losses, run.weights()


class FeatureMatching(Script):
    """Several critics in one list, whose features the generator is to match."""

    follows = "jik876/hifi-gan"
    needs = "MOX"

    @staticmethod
    def plain():
        generator = mlp(3, 8, 6)
        critics = nn.ModuleList(mlp(6 // k, 8, 1, seed=k) for k in (1, 2, 3))
        step_g, step_d = sgd(generator.parameters()), sgd(critics.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        losses = []
        for wave, z in data:
            fake = generator(z)
            step_d.zero_grad()
            loss_d = torch.zeros(())
            for k, critic in enumerate(critics, start=1):
                real, false = critic(wave[:, ::k]), critic(fake.detach()[:, ::k])
                loss_d = loss_d + (real - 1).pow(2).mean() + false.pow(2).mean()
            loss_d.backward()
            step_d.step()
            step_g.zero_grad()
            fake = generator(z)
            loss_g = 45 * F.l1_loss(fake, wave)
            for k, critic in enumerate(critics, start=1):
                wanted, got = critic[0](wave[:, ::k]), critic[0](fake[:, ::k])
                loss_g = loss_g + 2 * (wanted.detach() - got).abs().mean()
                loss_g = loss_g + (critic(fake[:, ::k]) - 1).pow(2).mean()
            (0.01 * loss_g).backward()
            step_g.step()
            losses += [loss_d, loss_g]
        return losses, weights(generator, critics)

    @staticmethod
    def with_shoal(run):
        generator = mlp(3, 8, 6)
        critics = nn.ModuleList(mlp(6 // k, 8, 1, seed=k) for k in (1, 2, 3))
        step_g, step_d = sgd(generator.parameters()), sgd(critics.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 3, seed=1))
        generator, critics, step_g, step_d, data = run.prepare(
            generator, critics, step_g, step_d, data
        )

        def critics_loss(wave, z):
            fake = generator(z)
            loss_d = torch.zeros(())
            for k, critic in enumerate(critics, start=1):
                real, false = critic(wave[:, ::k]), critic(fake.detach()[:, ::k])
                loss_d = loss_d + (real - 1).pow(2).mean() + false.pow(2).mean()
            return loss_d

        def generator_loss(wave, z):
            fake = generator(z)
            loss_g = 45 * F.l1_loss(fake, wave)
            for k, critic in enumerate(critics, start=1):
                wanted, got = critic[0](wave[:, ::k]), critic[0](fake[:, ::k])
                loss_g = loss_g + 2 * (wanted.detach() - got).abs().mean()
                loss_g = loss_g + (critic(fake[:, ::k]) - 1).pow(2).mean()
            return 0.01 * loss_g

        losses = []
        for wave, z in data:
            step_d.zero_grad()
            loss_d = run.forward_backward(critics_loss, wave, z)
            step_d.step()
            step_g.zero_grad()
            loss_g = run.forward_backward(generator_loss, wave, z)
            step_g.step()
            losses += [loss_d, 100 * loss_g]
        return losses, run.weights()


class AdversarialTraining(Script):
    """Inputs moved against the model by several inner steps."""

    follows = "MadryLab/robustness"
    needs = "D"

    @staticmethod
    def plain():
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        losses = []
        for x, y in data:
            moved = x.clone()
            for _ in range(3):
                moved.requires_grad_()
                loss = F.cross_entropy(model(moved), y)
                (slope,) = torch.autograd.grad(loss, moved)
                moved = (moved.detach() + 0.05 * slope.sign()).clamp(x - 0.1, x + 0.1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(moved), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            moved = x.clone()
            for _ in range(3):
                moved.requires_grad_()
                loss = F.cross_entropy(model(moved), y)
                (slope,) = torch.autograd.grad(loss, moved)
                moved = (moved.detach() + 0.05 * slope.sign()).clamp(x - 0.1, x + 0.1)
            return F.cross_entropy(model(moved), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class VirtualAdversary(Script):
    """A direction found by one inner backward pass, then two passes that must agree."""

    follows = "lyakaap/VAT-pytorch"
    needs = "DX"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=4))
        losses = []
        for x, y, direction in data:
            optimizer.zero_grad()
            truth = model(x).softmax(1).detach()
            d = F.normalize(direction, dim=1).requires_grad_()
            apart = F.kl_div(model(x + 0.1 * d).log_softmax(1), truth, reduction="batchmean")
            (slope,) = torch.autograd.grad(apart, d)
            moved = x + F.normalize(slope, dim=1)
            smooth = F.kl_div(model(moved).log_softmax(1), truth, reduction="batchmean")
            loss = F.cross_entropy(model(x), y) + smooth
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=4))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y, direction):
            truth = model(x).softmax(1).detach()
            d = F.normalize(direction, dim=1).requires_grad_()
            apart = F.kl_div(model(x + 0.1 * d).log_softmax(1), truth, reduction="batchmean")
            (slope,) = torch.autograd.grad(apart, d)
            moved = x + F.normalize(slope, dim=1)
            smooth = F.kl_div(model(moved).log_softmax(1), truth, reduction="batchmean")
            return F.cross_entropy(model(x), y) + smooth

        losses = []
        for x, y, direction in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y, direction)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
