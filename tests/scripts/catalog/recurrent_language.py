"""Language models that carry a state from batch to batch, or drop recurrent weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import BATCH, VOCABULARY, built, integers, loader, sequences, sgd
from tests.scripts.script import Script, weights


class Recurrent(nn.Module):
    """A language model that takes and returns its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.rnn(self.embedding(x), hidden.transpose(0, 1).contiguous())
        return self.head(output), hidden.transpose(0, 1)


class WordLanguageModel(Script):
    """Truncated backpropagation: the hidden state goes on from batch to batch; own SGD."""

    follows = "pytorch/examples word_language_model"
    needs = "SWN"

    @staticmethod
    def plain():
        model = built(Recurrent)
        text = integers(VOCABULARY, BATCH, 19)
        hidden = torch.zeros(BATCH, 1, 8)
        losses = []
        for start in range(0, 18, 6):
            x, y = text[:, start : start + 6], text[:, start + 1 : start + 7]
            model.zero_grad()
            output, hidden = model(x, hidden.detach())
            loss = F.cross_entropy(output.flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.5)
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Recurrent)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = run.prepare(model, optimizer)
        text = run.share(integers(VOCABULARY, BATCH, 19))
        hidden = torch.zeros(len(text), 1, 8)

        def compute_loss(x, y, hidden):
            output, hidden = model(x, hidden)
            return F.cross_entropy(output.flatten(0, 1), y.flatten()), hidden

        losses = []
        for start in range(0, 18, 6):
            x, y = text[:, start : start + 6], text[:, start + 1 : start + 7]
            model.zero_grad()
            loss, hidden = run.forward_backward(compute_loss, x, y, hidden, rows=len(x))
            run.clip_gradients(0.25)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class StepsByHand(Script):
    """The same with the original's own step, written on `parameter.data`."""

    follows = "pytorch/examples word_language_model, step unchanged"
    needs = "SWN"

    plain = WordLanguageModel.plain

    @staticmethod
    def with_shoal(run):
        model = built(Recurrent)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = run.prepare(model, optimizer)
        text = run.share(integers(VOCABULARY, BATCH, 19))
        hidden = torch.zeros(len(text), 1, 8)

        def compute_loss(x, y, hidden):
            output, hidden = model(x, hidden)
            return F.cross_entropy(output.flatten(0, 1), y.flatten()), hidden

        losses = []
        for start in range(0, 18, 6):
            x, y = text[:, start : start + 6], text[:, start + 1 : start + 7]
            model.zero_grad()
            loss, hidden = run.forward_backward(compute_loss, x, y, hidden, rows=len(x))
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.5)
            losses.append(loss)
        return losses, run.weights()


class WithMemory(nn.Module):
    """Attends to the states of the previous segment, which it returns as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(x)
        context = torch.cat([memory, h], dim=1)
        mixed, _ = self.attention(h, context, context, need_weights=False)
        return self.head(h + mixed), (h + mixed).detach()


class SegmentMemory(Script):
    """The memory of the last segment comes with each batch, and goes out of it."""

    follows = "kimiyoung/transformer-xl"
    needs = "SE"

    @staticmethod
    def plain():
        model = built(WithMemory)
        optimizer = sgd(model.parameters())
        text = integers(VOCABULARY, BATCH, 19)
        memory = torch.zeros(BATCH, 6, 8)
        losses = []
        for start in range(0, 18, 6):
            x, y = text[:, start : start + 6], text[:, start + 1 : start + 7]
            optimizer.zero_grad()
            logits, memory = model(x, memory)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(WithMemory)
        optimizer = sgd(model.parameters())
        model, optimizer = run.prepare(model, optimizer)
        text = run.share(integers(VOCABULARY, BATCH, 19))
        memory = torch.zeros(len(text), 6, 8)

        def compute_loss(x, y, memory):
            logits, memory = model(x, memory)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten()), memory

        losses = []
        for start in range(0, 18, 6):
            x, y = text[:, start : start + 6], text[:, start + 1 : start + 7]
            optimizer.zero_grad()
            loss, memory = run.forward_backward(compute_loss, x, y, memory, rows=len(x))
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class WeightDrop(nn.Module):
    """An LSTM cell whose recurrent weights are dropped anew in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.inputs = nn.Linear(8, 8)
        self.recurrent = nn.Parameter(torch.randn(8, 8) / 3)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(self.recurrent, 0.3, self.training)
        state, outputs = torch.zeros(len(x), 8), []
        for column in self.inputs(self.embedding(x)).unbind(1):
            state = torch.tanh(column + state @ dropped)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


class DroppedWeights(OneLossScript):
    """One mask for the recurrent weights of a whole batch; activation regularisation."""

    follows = "salesforce/awd-lstm-lm"
    needs = "R"
    draws = True

    def setup(self):
        return parts(built(WeightDrop), loader(*sequences()))

    def loss(self, model, x, y):
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * logits.pow(2).mean()
