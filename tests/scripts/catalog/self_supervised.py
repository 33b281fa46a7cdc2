"""Representations without labels: teachers, queues, centres and masks."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


class MomentumContrast(Script):
    """A queue of keys from earlier batches, and an encoder that follows slowly."""

    follows = "facebookresearch/moco"
    needs = "GTS"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        slow = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        queue = F.normalize(normal(10, 4, seed=2), dim=1)
        losses = []
        for a, b in data:
            optimizer.zero_grad()
            keys = F.normalize(slow(b), dim=1)
            queries = F.normalize(model(a), dim=1)
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1)
            loss = F.cross_entropy(logits / 0.2, torch.zeros(len(a), dtype=torch.long))
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, new in zip(slow.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(new, alpha=0.1)
            queue = torch.cat([keys, queue])[:10]
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        slow = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        queue = F.normalize(normal(10, 4, seed=2), dim=1)
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(a, keys):
            queries = F.normalize(model(a), dim=1)
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1)
            return F.cross_entropy(logits / 0.2, torch.zeros(len(a), dtype=torch.long))

        losses = []
        for a, b in data:
            optimizer.zero_grad()
            keys = F.normalize(slow(b), dim=1)
            loss = run.forward_backward(compute_loss, a, keys)
            optimizer.step()
            with torch.no_grad():
                for mean, new in zip(slow.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(new, alpha=0.1)
            queue = torch.cat([run.gather(keys), queue])[:10]
            losses.append(loss)
        return losses, run.weights()


class BootstrapTarget(OneLossScript):
    """A predictor on top, a target that is an average of the encoder's weights."""

    follows = "lucidrains/byol-pytorch"
    needs = "TM"

    def setup(self):
        encoder, predictor = mlp(6, 8, 4), mlp(4, 8, 4, seed=1)
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        return parts(encoder, predictor, loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1)))

    def loss(self, encoder, predictor, a, b):
        one = F.cosine_similarity(predictor(encoder(a)), self.target(b))
        two = F.cosine_similarity(predictor(encoder(b)), self.target(a))
        return (4 - 2 * one - 2 * two).mean()

    def after_step(self, step, model, optimizer, losses):
        with torch.no_grad():
            for mean, new in zip(self.target.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.1)


class SelfDistillation(Script):
    """A teacher whose outputs are centred by their mean over the global batch."""

    follows = "facebookresearch/dino"
    needs = "TB"

    @staticmethod
    def plain():
        student = mlp(6, 8, 4)
        teacher = copy.deepcopy(student).requires_grad_(False)
        optimizer = sgd(student.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        centre = torch.zeros(4)
        losses = []
        for a, b in data:
            optimizer.zero_grad()
            outputs = teacher(b)
            wanted = ((outputs - centre) / 0.05).softmax(1)
            loss = -(wanted * (student(a) / 0.1).log_softmax(1)).sum(1).mean()
            loss.backward()
            optimizer.step()
            centre = 0.9 * centre + 0.1 * outputs.mean(0)
            with torch.no_grad():
                for mean, new in zip(teacher.parameters(), student.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
            losses.append(loss)
        return losses, weights(student)

    @staticmethod
    def with_shoal(run):
        student = mlp(6, 8, 4)
        teacher = copy.deepcopy(student).requires_grad_(False)
        optimizer = sgd(student.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        centre = torch.zeros(4)
        student, optimizer, data = run.prepare(student, optimizer, data)

        def compute_loss(a, b):
            outputs = teacher(b)
            wanted = ((outputs - centre) / 0.05).softmax(1)
            loss = -(wanted * (student(a) / 0.1).log_softmax(1)).sum(1).mean()
            return loss, outputs

        losses = []
        for a, b in data:
            optimizer.zero_grad()
            loss, outputs = run.forward_backward(compute_loss, a, b)
            optimizer.step()
            centre = 0.9 * centre + 0.1 * run.gather(outputs).mean(0)
            with torch.no_grad():
                for mean, new in zip(teacher.parameters(), student.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
            losses.append(loss)
        return losses, run.weights()


class Prototypes(nn.Module):
    """An encoder and prototypes without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.prototypes = nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.prototypes(F.normalize(self.encoder(x), dim=1))


def _assign(scores: Tensor) -> Tensor:
    """Return soft assignments of the rows that use all prototypes equally (Sinkhorn)."""
    q = (scores / 0.5).exp()
    for _ in range(3):
        q = q / q.sum(0) / q.shape[1]
        q = q / q.sum(1, keepdim=True) / q.shape[0]
    return q * q.shape[0]


class SwappedAssignments(Script):
    """Assignments balanced over the global batch; prototypes normalised by hand in each step."""

    follows = "facebookresearch/swav"
    needs = "GW"

    @staticmethod
    def plain():
        model = built(Prototypes)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        losses = []
        for a, b in data:
            with torch.no_grad():
                model.prototypes.weight.copy_(F.normalize(model.prototypes.weight, dim=1))
            optimizer.zero_grad()
            sa, sb = model(a), model(b)
            qa, qb = _assign(sa.detach()), _assign(sb.detach())
            loss = -(qa * (sb / 0.1).log_softmax(1) + qb * (sa / 0.1).log_softmax(1)).sum(1).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Prototypes)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(a, b):
            sa, sb = model(a), model(b)
            qa, qb = (_assign(run.gather(s.detach()))[run.rows] for s in (sa, sb))
            return -(qa * (sb / 0.1).log_softmax(1) + qb * (sa / 0.1).log_softmax(1)).sum(1).mean()

        losses = []
        for a, b in data:
            with torch.no_grad():
                model.prototypes.weight.copy_(F.normalize(model.prototypes.weight, dim=1))
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, a, b)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class MaskedPatches(nn.Module):
    """Encodes the visible patches of each sample and predicts the hidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 4)
        self.mask_token = nn.Parameter(torch.zeros(8))
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, patches: Tensor, noise: Tensor) -> Tensor:
        order = noise.argsort(1)
        visible, hidden = order[:, :3], order[:, 3:]
        rows = torch.arange(len(patches))[:, None]
        h = self.mask_token.expand(len(patches), 9, 8).clone()
        h[rows, visible] = self.encoder(patches[rows, visible])
        h = h + self.mix(h, h, h, need_weights=False)[0]
        error = (self.decoder(h) - patches).pow(2).mean(-1)
        return error[rows, hidden].mean()


class MaskedAutoencoder(Script):
    """The model returns its own loss, over the patches that were hidden."""

    follows = "facebookresearch/mae"
    needs = "V"

    @staticmethod
    def plain():
        model = built(MaskedPatches)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 9, 4), normal(SAMPLES, 9, seed=1))
        losses = []
        for patches, noise in data:
            optimizer.zero_grad()
            loss = model(patches, noise)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(MaskedPatches)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 9, 4), normal(SAMPLES, 9, seed=1))
        model, optimizer, data = run.prepare(model, optimizer, data)
        losses = []
        for patches, noise in data:
            optimizer.zero_grad()
            loss = run.forward_backward(model, patches, noise)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class RelativePositions(OneLossScript):
    """A pretext task: which of four turns was made; the turns are made in the loop."""

    follows = "gidariss/FeatureLearningRotNet"
    needs = "V"

    def setup(self):
        return parts(mlp(16, 8, 4), loader(normal(SAMPLES, 4, 4)))

    def loss(self, model, x):
        turned = torch.cat([x.rot90(k, (1, 2)) for k in range(4)]).flatten(1)
        return F.cross_entropy(model(turned), torch.arange(4).repeat_interleave(len(x)))
