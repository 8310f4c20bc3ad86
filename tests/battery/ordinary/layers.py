"""Torch's own layers, and what torch does to layers: parametrizations, pruning, checkpointing."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.battery.ordinary.case import HALF_SHOWS, MIXED, Row
from tests.battery.ordinary.models import tokens_of
from tests.toy import NUM_CLASSES, NUM_FEATURES

NO_LSTM = {"16-mixed": "could not create a primitive descriptor"}  # on a CPU


class _Sequence(Row):
    """Three steps of four features each."""

    core: type[nn.Module]
    lr, epochs = 0.5, 4

    def build(self):
        self.layer, self.head = self.core(4, 16, batch_first=True), nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.layer(x.view(-1, 3, 4))[0][:, -1])


class Lstm(_Sequence):
    core = nn.LSTM
    mixed_fails = NO_LSTM


class Gru(_Sequence):
    core = nn.GRU


class Rnn(_Sequence):
    core = nn.RNN


class LstmWithFirstState(_Sequence):
    """Learned first states, and a packed sequence."""

    core = nn.LSTM
    mixed_fails = NO_LSTM

    def build(self):
        super().build()
        self.first = nn.Parameter(torch.zeros(2, 1, 1, 16))

    def forward(self, x):
        h, c = (state.expand(1, len(x), 16).contiguous() for state in self.first)
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 3, 4), torch.full((len(x),), 3), batch_first=True)
        return self.head(self.layer(packed, (h, c))[1][0][0])


class LstmCell(Row):
    lr, epochs = 0.5, 4

    def build(self):
        self.cell, self.head = nn.LSTMCell(4, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        h = c = torch.zeros(len(x), 16, device=x.device)
        for step in x.view(-1, 3, 4).unbind(1):
            h, c = self.cell(step, (h, c))
        return self.head(h)


class GruCell(LstmCell):
    def build(self):
        self.cell, self.head = nn.GRUCell(4, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        h = torch.zeros(len(x), 16, device=x.device)
        for step in x.view(-1, 3, 4).unbind(1):
            h = self.cell(step, h)
        return self.head(h)


class Embedding(Row):
    def build(self):
        self.embedding, self.head = nn.Embedding(8, 8, padding_idx=0), nn.Linear(96, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.embedding(tokens_of(x)).flatten(1))


class EmbeddingBag(Row):
    lr = 1.0

    def build(self):
        self.embedding, self.head = nn.EmbeddingBag(96, 8), nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.embedding(tokens_of(x) + 8 * torch.arange(12)))


class NormedEmbedding(Embedding):
    def build(self):
        self.embedding, self.head = nn.Embedding(8, 8, max_norm=1.0), nn.Linear(96, NUM_CLASSES)


class Encoder(Row):
    roundings = 24  # two layers with six products each

    def build(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.embed, self.mix = nn.Linear(4, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.mix(self.embed(x.view(-1, 3, 4))).mean(1))


class Decoder(Row):
    def build(self):
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, NUM_CLASSES)
        self.mix = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        memory = self.embed(x.view(-1, 3, 4))
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        return self.head(self.mix(memory, memory, tgt_mask=mask, tgt_is_causal=True).mean(1))


class Attention(Row):
    def build(self):
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(12, NUM_CLASSES)

    def forward(self, x):
        x = x.view(-1, 3, 4)
        return self.head((x + self.mix(x, x, x, need_weights=True)[0]).flatten(1))


class Convolutions(Row):
    def build(self):
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, NUM_FEATURES)), nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), nn.PReLU(),
            nn.Conv1d(8, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.ConvTranspose1d(8, 4, 3),
            nn.InstanceNorm1d(4, affine=True), nn.Dropout(0.1), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
            nn.Linear(16, NUM_CLASSES),
        )  # fmt: skip


class NormsInARow(Row):
    ignored_warnings = ("Mismatch dtype between input and weight",)  # of `RMSNorm`'s, under mixed precision

    def build(self):
        self.net = nn.Sequential(
            nn.BatchNorm1d(NUM_FEATURES), nn.Linear(NUM_FEATURES, 16), nn.LayerNorm(16), nn.RMSNorm(16), nn.SiLU(),
            nn.Linear(16, NUM_CLASSES),
        )  # fmt: skip


class Bilinear(Row):
    refused: ClassVar = {"bf16-true": HALF_SHOWS["bf16-true"]}

    mixed_fails = dict.fromkeys(MIXED, "All tensors must have the same dtype")  # on a CPU: autocast leaves it out

    def build(self):
        self.net, self.mix = nn.Linear(NUM_FEATURES, 4), nn.Bilinear(4, NUM_FEATURES, NUM_CLASSES)

    def forward(self, x):
        return self.mix(self.net(x), x)


class Warp(Row):
    """A spatial transformer: the grid is learned, the picture is as it came."""

    roundings = 24  # a bilinear sample has a kink at each pixel

    def build(self):
        super().build()
        self.theta = nn.Parameter(torch.tensor([[0.8, 0.1, 0.05], [0.1, 0.8, 0.05]]))

    def forward(self, x):
        grid = F.affine_grid(self.theta.expand(len(x), 2, 3).float(), [len(x), 1, 3, 4], align_corners=False)
        return self.net(F.grid_sample(x.view(-1, 1, 3, 4), grid, align_corners=False).flatten(1))


class WeightNorm(Row):
    def build(self):
        super().build()
        parametrizations.weight_norm(self.net[0])


class OldWeightNorm(Row):
    ignored_warnings = ("`torch.nn.utils.weight_norm` is deprecated",)

    def build(self):
        super().build()
        nn.utils.weight_norm(self.net[0])


class Orthogonal(Row):
    def build(self):
        super().build()
        parametrizations.orthogonal(self.net[0])


class OrthogonalByCayley(Row):
    def build(self):
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.ReLU(), nn.Linear(NUM_FEATURES, NUM_CLASSES))
        parametrizations.orthogonal(self.net[0], orthogonal_map="cayley")


class SpectralNorm(Row):
    def build(self):
        super().build()
        parametrizations.spectral_norm(self.net[0])


class OldSpectralNorm(Row):
    ignored_warnings = ("`torch.nn.utils.spectral_norm` is",)

    def build(self):
        super().build()
        nn.utils.spectral_norm(self.net[0])


class OwnParametrization(Row):
    """A symmetric layer."""

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

    def build(self):
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.ReLU(), nn.Linear(NUM_FEATURES, NUM_CLASSES))
        nn.utils.parametrize.register_parametrization(self.net[0], "weight", self.Symmetric())


class Lora(Row):
    """Low-rank changes of a frozen layer."""

    lr = 0.2

    def build(self):
        super().build()
        self.net[0].requires_grad_(False)
        self.a, self.b = nn.Linear(NUM_FEATURES, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.net[1:](self.net[0](x) + self.b(self.a(x)))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-2)


class FrozenInEvalMode(Row):
    """A frozen backbone with statistics of its own, called under `no_grad`."""

    def build(self):
        super().build()
        self.backbone = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.BatchNorm1d(NUM_FEATURES))
        self.backbone.requires_grad_(False)

    def forward(self, x):
        self.backbone.eval()
        with torch.no_grad():
            x = self.backbone(x)
        return self.net(x)


class PrunedByHand(Row):
    def build(self):
        super().build()
        prune.l1_unstructured(self.net[0], "weight", amount=0.5)


class Checkpointed(Row):
    reentrant = False

    def build(self):
        super().build()
        self.mix = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16))

    def forward(self, x):
        h = self.net[:2](x)
        return self.net[2](h + checkpoint(self.mix, h, use_reentrant=self.reentrant))


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedLstm(_Sequence):
    core = nn.LSTM
    mixed_fails = NO_LSTM

    def forward(self, x):
        out = checkpoint(lambda t: self.layer(t)[0], x.view(-1, 3, 4), use_reentrant=False)
        return self.head(out[:, -1])


class TwiceInAStep(Row):
    """A Siamese net: one set of weights, two forward passes; the second of them detached."""

    def loss(self, batch):
        x, y = batch
        with torch.no_grad():
            target = self(x.flip(0)).softmax(-1).flip(0)
        return F.cross_entropy(self(x), y) + 0.1 * F.mse_loss(self(x).softmax(-1), target)
