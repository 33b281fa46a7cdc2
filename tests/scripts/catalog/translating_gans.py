"""Generators that translate images, against several critics."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.samples import SAMPLES, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


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
