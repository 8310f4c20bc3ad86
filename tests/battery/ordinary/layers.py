"""Torch's layers, and torch functions that change layers: parametrizations, pruning, checkpointing."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.battery.case import HALF_SHOWS, Row, row
from tests.battery.ordinary.models import tokens_of, values
from tests.toy import NUM_CLASSES, NUM_FEATURES


def head(size):
    return lambda: nn.Linear(size, NUM_CLASSES)


def steps_of(x):
    return x.view(-1, 3, 4)


def recurrent(core, forward=None, **special):
    parts = {"layer": lambda: core(4, 16, batch_first=True), "head": head(16)}
    forward = forward or (lambda self, x: self.head(self.layer(steps_of(x))[0][:, -1]))
    return row(parts=parts, lr=0.5, epochs=4, forward=forward, **special)


def from_first_state(self, x):
    h, c = (state.expand(1, len(x), 16).contiguous() for state in self.first)
    packed = nn.utils.rnn.pack_padded_sequence(
        steps_of(x), torch.full((len(x),), 3), batch_first=True
    )
    return self.head(self.layer(packed, (h, c))[1][0][0])


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def embedded(make, **special):
    return row(
        parts={"embedding": make, "head": head(96)},
        forward=lambda self, x: self.head(self.embedding(tokens_of(x)).flatten(1)),
        **special,
    )


def changed(change, *, is_square=False, **special):
    if is_square:
        width = NUM_FEATURES
    else:
        width = 16

    def build(self):
        self.net = nn.Sequential(
            nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES)
        )
        change(self.net[0])

    return row(build=build, **special)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


def sequence(*layers):
    return {"net": lambda: nn.Sequential(*(layer() for layer in layers))}


CONVOLUTIONS = sequence(
    lambda: nn.Unflatten(1, (1, NUM_FEATURES)),
    lambda: nn.Conv1d(1, 8, 3, padding=1),
    lambda: nn.BatchNorm1d(8),
    nn.PReLU,
    lambda: nn.Conv1d(8, 8, 3),
    lambda: nn.GroupNorm(2, 8),
    nn.GELU,
    lambda: nn.ConvTranspose1d(8, 4, 3),
    lambda: nn.InstanceNorm1d(4, affine=True),
    lambda: nn.Dropout(0.1),
    lambda: nn.AdaptiveAvgPool1d(4),
    nn.Flatten,
    head(16),
)
NORMS = sequence(
    lambda: nn.BatchNorm1d(NUM_FEATURES),
    lambda: nn.Linear(NUM_FEATURES, 16),
    lambda: nn.LayerNorm(16),
    lambda: nn.RMSNorm(16),
    nn.SiLU,
    head(16),
)
EMBED = {"embed": lambda: nn.Linear(4, 8)}
ROWS = {
    "Lstm": recurrent(nn.LSTM),
    "LstmWithFirstState": recurrent(
        nn.LSTM, from_first_state, adds=values(first=lambda: torch.zeros(2, 1, 1, 16))
    ),
    "Embedding": embedded(lambda: nn.Embedding(8, 8, padding_idx=0)),
    "NormedEmbedding": embedded(lambda: nn.Embedding(8, 8, max_norm=1.0)),
    "Encoder": row(
        parts={"mix": encoder, **EMBED, "head": head(8)},
        forward=lambda self, x: self.head(self.mix(self.embed(steps_of(x))).mean(1)),
        roundings=24,  # two layers with six products each
    ),
    "Convolutions": row(parts=CONVOLUTIONS),
    "NormsInARow": row(parts=NORMS),
    "Bilinear": row(
        parts={
            "net": lambda: nn.Linear(NUM_FEATURES, 4),
            "mix": lambda: nn.Bilinear(4, NUM_FEATURES, NUM_CLASSES),
        },
        forward=lambda self, x: self.mix(self.net(x), x),
        refused={"bf16-true": HALF_SHOWS["bf16-true"]},
    ),
    "WeightNorm": changed(parametrizations.weight_norm),
    "Orthogonal": changed(parametrizations.orthogonal),
    "SpectralNorm": changed(parametrizations.spectral_norm),
    "OwnParametrization": changed(
        lambda x: nn.utils.parametrize.register_parametrization(x, "weight", Symmetric()),
        is_square=True,
    ),
    "PrunedByHand": changed(lambda x: prune.l1_unstructured(x, "weight", amount=0.5)),
}


class FrozenInEvalMode(Row):
    def build(self):
        super().build()
        self.backbone = nn.Sequential(
            nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.BatchNorm1d(NUM_FEATURES)
        )
        self.backbone.requires_grad_(False)

    def forward(self, x):
        self.backbone.eval()
        with torch.no_grad():
            x = self.backbone(x)
        return self.net(x)


class CheckpointedReentrant(Row):
    adds = {
        "mix": lambda: nn.Sequential(
            nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16)
        )
    }

    def forward(self, x):
        h = self.net[:2](x)
        return self.net[2](h + checkpoint(self.mix, h, use_reentrant=True))
