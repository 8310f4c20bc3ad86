"""Models that users write by hand, in which their own parameters are combined with tensors of any dtype."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import HALF_SHOWS, Row, row, samples
from tests.toy import NUM_CLASSES, NUM_FEATURES

Value = nn.Parameter


def tokens_of(x):
    """Turn `"batch 12"` numbers into as many of 8 tokens."""
    return (x * 2).round().long().clamp(-4, 3) + 4


def values(**makers):
    return {name: lambda make=make: Value(make()) for name, make in makers.items()}


def clip_logits(self, x):
    return F.normalize(self.image(x), dim=-1) @ F.normalize(self.text, dim=-1).t()


def clip(temperature):
    values_of_it = values(
        text=lambda: torch.randn(NUM_CLASSES, 8), temperature=lambda: torch.tensor(temperature)
    )
    return {"image": lambda: nn.Linear(NUM_FEATURES, 8), **values_of_it}


def filtered(self, x, gain):
    return self.net(torch.fft.irfft(torch.fft.rfft(x.float()) * gain, n=NUM_FEATURES))


def glow(self, batch):
    """Return the loss of an invertible linear flow. `slogdet` has no half-precision kernel and no autocast rule."""
    z = batch[0] @ self.weight + self.shift
    return z.float().square().sum(-1).mean() / 2 - torch.linalg.slogdet(self.weight)[1]


def tied(self, batch):
    tokens = tokens_of(batch[0])
    context = self.embedding(tokens).cumsum(1) / torch.arange(1, 13)[:, None]
    return F.cross_entropy(self.head(context).flatten(0, 1) / 4, tokens.flatten())


def penalised(self, batch):
    decay = sum(p.pow(2).sum() for p in self.parameters())
    return Row.loss(self, batch) + 1e-3 * decay + 1e-3 * self.net[0].weight.abs().sum()


def targets(make, loss):
    def train_dataloader(self):
        images = samples().images
        return DataLoader(TensorDataset(images, make(images[:, :1] + images[:, 1:2])), batch_size=8)

    net = {"net": lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))}
    return row(
        parts=net,
        lr=0.05,
        train_dataloader=train_dataloader,
        loss=lambda self, b: loss(self(b[0]), b[1]),
    )


def large(sums):
    return 1e5 * sums + 2e5  # beyond 65,504, the maximum of fp16


def vector(value, size=NUM_FEATURES):
    return lambda: torch.full((size,), value)


GAIN_AND_SHIFT = values(gain=vector(1.0, 16), shift=vector(0.0, 16))
ROWS = {
    "Plain": row(),
    "Temperature": row(
        parts=clip(4.0), forward=lambda self, x: clip_logits(self, x).float() * self.temperature
    ),
    "Positional": row(
        adds=values(position=vector(0.0)), forward=lambda self, x: self.net(x + self.position)
    ),
    "FunctionalLayerNorm": row(  # as in ConvNeXt: a custom module that calls `F.layer_norm`
        adds=GAIN_AND_SHIFT,
        forward=lambda self, x: self.net[2](
            F.relu(F.layer_norm(self.net[0](x), (16,), self.gain, self.shift))
        ),
    ),
    # learned filter on the spectrum, with real and imaginary parts in the last dimension (GFNet)
    "FourierFilter": row(
        adds=values(filter=lambda: torch.stack([torch.ones(7), torch.zeros(7)], dim=-1)),
        forward=lambda self, x: filtered(self, x, torch.view_as_complex(self.filter)),
    ),
    "ComplexParameter": row(
        adds=values(filter=lambda: torch.ones(7, dtype=torch.complex64)),
        forward=lambda self, x: filtered(self, x, self.filter),
    ),
    "Glow": row(
        parts=values(weight=lambda: torch.eye(12) + 0.1 * torch.randn(12, 12), shift=vector(1.0)),
        loss=glow,
        lr=0.01,
        refused=HALF_SHOWS,
    ),
    "LargeTargets": targets(large, lambda said, y: F.mse_loss(said.float(), y / 1e5)),
    "Penalty": row(loss=penalised),
    "DoubleParameter": row(
        adds=values(shift=lambda: torch.zeros(NUM_CLASSES, dtype=torch.float64)),
        forward=lambda self, x: self.net(x) + self.shift,
    ),
}


class TiedWeights(Row):
    lr = 1.0
    epochs = 8
    falls_to = 0.9
    loss = tied

    def build(self):
        self.embedding = nn.Embedding(8, 16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight


class MaskBuffer(Row):
    parts = {
        "mask": lambda: torch.full((3, 3), -1e9).triu(1),
        "qkv": lambda: nn.Linear(4, 24),
        "out": lambda: nn.Linear(8, NUM_CLASSES),
    }

    def forward(self, x):
        q, k, v = self.qkv(x.view(-1, 3, 4)).chunk(3, dim=-1)
        return self.out((F.softmax(q @ k.transpose(1, 2) / 3 + self.mask, dim=-1) @ v).sum(1))


class AutocastDisabled(Row):
    """Module with a region that must be exact and calls `.float()` on all of its inputs."""

    adds = values(weight=lambda: torch.randn(NUM_CLASSES, NUM_CLASSES) * 0.5)

    def forward(self, x):
        x = self.net(x)
        with torch.autocast(self.device.type, enabled=False):
            return x.float() @ self.weight.float()


class InPlaceSums(Row):
    """Module that adds in place to an fp32 tensor of the user."""

    parts = {
        "layers": lambda: nn.ModuleList(nn.Linear(NUM_FEATURES, NUM_CLASSES) for _ in range(3))
    }

    def forward(self, x):
        total = torch.zeros(len(x), NUM_CLASSES, device=self.device)
        for layer in self.layers:
            total += layer(x) / 3
        return total


class ParameterArithmetic(Row):
    """Layer whose weight is computed from parameters: a low-rank product with a mask and a scale."""

    adds = values(
        a=lambda: torch.randn(16, 2) * 0.1,
        b=lambda: torch.randn(2, 12) * 0.1,
        gate=lambda: torch.zeros(16, 1),
    )
    adds |= {"mask": lambda: (torch.rand(16, NUM_FEATURES) > 0.2).float()}

    def forward(self, x):
        weight = (self.net[0].weight + self.a @ self.b) * self.mask * torch.sigmoid(self.gate)
        return self.net[2](F.relu(F.linear(x, weight, self.net[0].bias)))


class OwnFunction(Row):
    """Module with an autograd function that computes, and returns gradients, in fp32."""

    class _Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.float() @ w.float()

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            with torch.autocast("cpu", enabled=False):
                return gradient.float() @ w.float().t(), x.float().t() @ gradient.float()

    adds = AutocastDisabled.adds

    def forward(self, x):
        return self._Product.apply(self.net(x), self.weight)


class Maml(Row):
    def loss(self, batch):
        x, y = batch
        weights = dict(self.net.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(self.net, weights, x[:4]), y[:4])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, fast, x[4:]), y[4:])


class FollowsWeights(Row):
    def forward(self, x):
        dtype = next(self.parameters()).dtype
        x = x.to(dtype) + torch.zeros(NUM_FEATURES, dtype=dtype, device=self.device)
        lowest = torch.finfo(dtype).min
        return self.net(x.masked_fill(x < lowest / 2, 0.0)) + torch.zeros(1).type_as(
            self.net[2].bias
        )


class Contrast(Row):
    """SimCLR, which gathers the embeddings of all ranks with gradients."""

    epochs = 6
    worlds = (2,)
    lr = 0.02
    falls_to = 0.9
    roundings = 24  # gradients of logits that are five times a product
    ignored_warnings = ("torch.distributed.nn.functional.all_gather is deprecated",)

    def loss(self, batch):
        x, _ = batch
        first_view = F.normalize(self.net(x).float(), dim=-1)
        second_view = F.normalize(self.net(x * 1.1 + 0.05).float(), dim=-1)
        of_all_ranks = self.all_gather(second_view, sync_grads=True).flatten(0, 1)
        targets = torch.arange(len(x)) + len(x) * self.global_rank
        return F.cross_entropy(first_view @ of_all_ranks.t() * 5, targets)
