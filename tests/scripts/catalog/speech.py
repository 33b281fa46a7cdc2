"""Speech: recognition and synthesis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import (
    BATCH,
    SAMPLES,
    VOCABULARY,
    ListOfSamples,
    built,
    integers,
    loader,
    normal,
)


class Recogniser(nn.Module):
    """Log-probabilities of characters for every frame of a padded spectrogram."""

    def __init__(self, packs: bool = True) -> None:
        super().__init__()
        self.packs = packs  # without it, the recurrent layer reads what was padded
        self.conv = nn.Conv1d(4, 8, 3, padding=1, bias=False)
        self.rnn = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        h = self.conv(frames.transpose(1, 2)).relu().transpose(1, 2)
        if not self.packs:
            return self.head(self.rnn(h)[0]).log_softmax(-1)
        packed = nn.utils.rnn.pack_padded_sequence(
            h, lengths, batch_first=True, enforce_sorted=False
        )
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(h).log_softmax(-1)


def _spoken() -> DataLoader:
    """Return a loader of (frames, their lengths, characters, their lengths) of ragged samples."""
    lengths = integers(5, SAMPLES, seed=4) + 8
    counts = integers(3, SAMPLES, seed=5) + 1
    samples = [
        (normal(int(n), 4, seed=i), integers(VOCABULARY - 1, int(c), seed=i) + 1)
        for i, (n, c) in enumerate(zip(lengths, counts, strict=True))
    ]
    return DataLoader(ListOfSamples(samples), batch_size=BATCH, collate_fn=_padded)


def _padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    frames, characters = zip(*samples, strict=True)
    return (
        nn.utils.rnn.pad_sequence(list(frames), batch_first=True),
        torch.tensor([len(item) for item in frames]),
        nn.utils.rnn.pad_sequence(list(characters), batch_first=True),
        torch.tensor([len(item) for item in characters]),
    )


class SpeechCtc(OneLossScript):
    """CTC of ragged spectrograms: the mean over samples, each divided by its own length."""

    follows = "SeanNaren/deepspeech.pytorch"
    needs = "VC"
    clip = 1.0

    packs = True

    def setup(self):
        model = built(Recogniser, self.packs)
        self.ctc = nn.CTCLoss(zero_infinity=True)
        return parts(model, _spoken(), lr=0.02)

    def loss(self, model, frames, lengths, characters, counts):
        output = model(frames, lengths).transpose(0, 1)
        return self.ctc(output, characters, lengths, counts)


class SpeechCtcPaddingLeaks(SpeechCtc):
    """A model that reads the padding: its outputs depend on the longest sample beside each."""

    follows = "many CTC tutorials"
    packs = False


class SpeechCtcByCharacters(OneLossScript):
    """CTC as a sum, divided by the characters of the batch."""

    follows = "fairseq criterions/ctc.py"
    needs = "VC"

    def setup(self):
        model = built(Recogniser)
        self.ctc = nn.CTCLoss(reduction="sum", zero_infinity=True)
        return parts(model, _spoken(), lr=0.02)

    def loss(self, model, frames, lengths, characters, counts):
        output = model(frames, lengths).transpose(0, 1)
        return self.ctc(output, characters, lengths, counts) / counts.sum()

    def shoal_loss(self, run, model, frames, lengths, characters, counts):
        output = model(frames, lengths).transpose(0, 1)
        return shoal.counted(self.ctc(output, characters, lengths, counts), counts.sum())


class Synthesiser(nn.Module):
    """Frames from characters under teacher forcing, with a gate that says where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.decoder = nn.GRUCell(12, 8)
        self.frame = nn.Linear(8, 4)
        self.gate = nn.Linear(8, 1)

    def forward(self, characters: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        context = self.embedding(characters).mean(1)
        state, outputs = torch.zeros(len(frames), 8), []
        for previous in F.pad(frames, (0, 0, 1, 0))[:, :-1].unbind(1):
            state = self.decoder(torch.cat([previous, context], 1), state)
            outputs.append(state)
        h = torch.stack(outputs, 1)
        return self.frame(h), self.gate(h).squeeze(-1)


class SpeechSynthesis(OneLossScript):
    """Teacher forcing: two means, one over frames that count and one over all."""

    follows = "NVIDIA/tacotron2"
    needs = "VC"

    def setup(self):
        model = built(Synthesiser)
        lengths = integers(4, SAMPLES, seed=4) + 2
        return parts(
            model, loader(integers(VOCABULARY, SAMPLES, 3), normal(SAMPLES, 5, 4), lengths), lr=0.02
        )

    def loss(self, model, characters, frames, lengths):
        live = (torch.arange(5) < lengths[:, None]).double()
        output, gate = model(characters, frames)
        error = ((output - frames).pow(2).mean(-1) * live).sum() / live.sum()
        return error + F.binary_cross_entropy_with_logits(gate, 1 - live)

    def shoal_loss(self, run, model, characters, frames, lengths):
        live = (torch.arange(5) < lengths[:, None]).double()
        output, gate = model(characters, frames)
        error = ((output - frames).pow(2).mean(-1) * live).sum()
        gate_loss = F.binary_cross_entropy_with_logits(gate, 1 - live)
        return shoal.counted(error, live.sum()) + gate_loss


class Waves(nn.Module):
    """Context vectors of a wave, and the quantised targets of the same steps."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv1d(1, 8, 3, stride=2, padding=1)
        self.context = nn.GRU(8, 8, batch_first=True)
        self.quantiser = nn.Linear(8, 8)

    def forward(self, wave: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        z = self.features(wave[:, None]).transpose(1, 2)
        c, _ = self.context(z * (1 - mask[..., None]))
        return c, self.quantiser(z)


class MaskedSpeech(OneLossScript):
    """Contrastive prediction of masked steps against the other steps of the same wave."""

    follows = "fairseq wav2vec 2.0"
    needs = "C"

    def setup(self):
        return parts(
            built(Waves), loader(normal(SAMPLES, 12), integers(2, SAMPLES, 6, seed=8).double())
        )

    def loss(self, model, wave, mask):
        context, targets = model(wave, mask)
        scores = F.cosine_similarity(context[:, :, None], targets[:, None], dim=-1) / 0.1
        each = F.cross_entropy(
            scores.transpose(1, 2), torch.arange(6).expand(len(wave), 6), reduction="none"
        )
        return (each * mask).sum() / mask.sum()

    def shoal_loss(self, run, model, wave, mask):
        context, targets = model(wave, mask)
        scores = F.cosine_similarity(context[:, :, None], targets[:, None], dim=-1) / 0.1
        each = F.cross_entropy(
            scores.transpose(1, 2), torch.arange(6).expand(len(wave), 6), reduction="none"
        )
        return shoal.counted((each * mask).sum(), mask.sum())
