"""Models that people write by hand: their own parameters meet tensors of any dtype."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.battery.ordinary.case import HALF_SHOWS, Row, samples
from tests.toy import NUM_CLASSES, NUM_FEATURES


def tokens_of(x):
    """`"batch 12"` numbers -> as many tokens of 8."""
    return (x * 2).round().long().clamp(-4, 3) + 4


class Plain(Row):
    pass


class Temperature(Row):
    """The head of CLIP."""

    def build(self):
        self.image = nn.Linear(NUM_FEATURES, 8)
        self.text = nn.Parameter(torch.randn(NUM_CLASSES, 8))
        self.temperature = nn.Parameter(torch.tensor(4.0))

    def forward(self, x):
        logits = F.normalize(self.image(x), dim=-1) @ F.normalize(self.text, dim=-1).t()
        return logits.float() * self.temperature


class LogTemperature(Temperature):
    def build(self):
        super().build()
        self.temperature = nn.Parameter(torch.tensor(math.log(4.0)))

    def forward(self, x):
        logits = F.normalize(self.image(x), dim=-1) @ F.normalize(self.text, dim=-1).t()
        return logits * self.temperature.exp()


class Positional(Row):
    def build(self):
        super().build()
        self.position = nn.Parameter(torch.zeros(NUM_FEATURES))

    def forward(self, x):
        return self.net(x + self.position)


class PositionalInFp32(Positional):
    def forward(self, x):
        return self.net(x.float() + self.position)


class ClassToken(Row):
    lr, epochs = 0.02, 4
    roundings = 24  # six products in a layer, and two norms

    def build(self):
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16, NUM_CLASSES)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 4, 16) * 0.02)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x.view(-1, 3, 4))], dim=1) + self.position
        return self.head(self.mix(x)[:, 0])


class MaskToken(Row):
    """BERT, MAE: some places get a learned value."""

    def build(self):
        super().build()
        self.token = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = x.clone()
        x[:, 0] = self.token
        x[x > 2.0] = self.token
        return self.net(x)


class HandRMSNorm(Row):
    def build(self):
        super().build()
        self.gain = nn.Parameter(torch.ones(NUM_FEATURES))

    def forward(self, x):
        return self.net(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain)


class HandRMSNormInFp32(HandRMSNorm):
    """Llama's."""

    def forward(self, x):
        h = self.net[0](x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.net[2](F.relu(self.gain.repeat(2)[:16] * h))


class HandLayerNorm(Row):
    def build(self):
        super().build()
        self.gain, self.shift = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        x = self.net[0](x)
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)
        return self.net[2](F.relu(self.gain * x + self.shift))


class FunctionalLayerNorm(Row):
    """ConvNeXt's: a module of one's own with `F.layer_norm`."""

    def build(self):
        super().build()
        self.gain, self.shift = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return self.net[2](F.relu(F.layer_norm(self.net[0](x), (16,), self.gain, self.shift)))


class FunctionalLayerNormOfInputs(FunctionalLayerNorm):
    def forward(self, x):
        return self.net(F.layer_norm(x, (NUM_FEATURES,), self.gain[:NUM_FEATURES], self.shift[:NUM_FEATURES]))


class LayerScale(Row):
    def build(self):
        super().build()
        self.scale = nn.Parameter(torch.full((16,), 0.1))

    def forward(self, x):
        h = self.net[0](x)
        return self.net[2](h + self.scale * torch.tanh(h.float()))


class UncertaintyWeights(Row):
    """Several losses, weighted by learned variances (Kendall)."""

    def build(self):
        super().build()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def loss(self, batch):
        x, y = batch
        logits = self(x)
        losses = torch.stack([F.cross_entropy(logits, y), F.mse_loss(logits.softmax(-1), F.one_hot(y, 3).float())])
        return (losses * torch.exp(-self.log_variances) + self.log_variances / 4).sum() + 1


class Crf(Row):
    """A linear chain, its normaliser by the forward algorithm."""

    def build(self):
        self.emission = nn.Linear(4, NUM_CLASSES)
        self.transition = nn.Parameter(torch.randn(NUM_CLASSES, NUM_CLASSES) * 0.1)
        self.first = nn.Parameter(torch.zeros(NUM_CLASSES))

    def loss(self, batch):
        x, y = batch
        emissions = self.emission(x.view(-1, 3, 4))
        tags = torch.stack([y, (y + 1) % 3, y], dim=1)
        alpha, score = self.first + emissions[:, 0], self.first[y] + emissions[:, 0].gather(1, tags[:, :1])[:, 0]
        for t in (1, 2):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transition, dim=1) + emissions[:, t]
            score = (
                score
                + self.transition[tags[:, t - 1], tags[:, t]]
                + emissions[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            )
        return (torch.logsumexp(alpha, dim=1) - score).mean()


class FourierFilter(Row):
    """A learned filter on the spectrum, real and imaginary part in a last dimension (GFNet)."""

    def build(self):
        super().build()
        self.filter = nn.Parameter(torch.stack([torch.ones(7), torch.zeros(7)], dim=-1))

    def forward(self, x):
        return self.net(torch.fft.irfft(torch.fft.rfft(x.float()) * torch.view_as_complex(self.filter), n=NUM_FEATURES))


class RealFourierFilter(Row):
    def build(self):
        super().build()
        self.filter = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return self.net(torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=NUM_FEATURES))


class ComplexParameter(Row):
    mixed_fails = {"16-mixed": "not implemented for 'ComplexFloat'"}

    def build(self):
        super().build()
        self.filter = nn.Parameter(torch.ones(7, dtype=torch.complex64))

    def forward(self, x):
        return self.net(torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=NUM_FEATURES))


class Glow(Row):
    """An invertible linear flow: `slogdet` knows no half precision, with no autocast."""

    refused = HALF_SHOWS

    lr = 0.01

    def build(self):
        self.weight = nn.Parameter(torch.eye(NUM_FEATURES) + 0.1 * torch.randn(NUM_FEATURES, NUM_FEATURES))
        self.shift = nn.Parameter(torch.full((NUM_FEATURES,), 1.0))

    def loss(self, batch):
        z = batch[0] @ self.weight + self.shift
        return z.float().square().sum(-1).mean() / 2 - torch.linalg.slogdet(self.weight)[1]


class Vae(Row):
    lr, epochs, falls_to = 0.02, 5, 0.8

    def build(self):
        self.encoder, self.decoder = nn.Linear(NUM_FEATURES, 8), nn.Linear(4, NUM_FEATURES)
        self.prior = nn.Parameter(torch.zeros(4))

    def loss(self, batch):
        mu, log_sigma = self.encoder(batch[0]).tanh().chunk(2, dim=-1)
        posterior = torch.distributions.Normal(mu, log_sigma.exp())
        noise = torch.randn(mu.shape, generator=torch.Generator().manual_seed(1))
        x = self.decoder(mu + noise * log_sigma.exp())
        divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(self.prior, 1.0))
        return F.mse_loss(x, batch[0]) + 0.1 * divergence.mean()


class Prototypes(Row):
    """Classes by distance from learned points."""

    def build(self):
        super().build()
        self.points = nn.Parameter(torch.randn(NUM_CLASSES, NUM_CLASSES))

    def forward(self, x):
        return -torch.cdist(self.net(x).float(), self.points)


class TiedWeights(Row):
    """A language model in small: what reads tokens also writes them."""

    lr, epochs, falls_to = 1.0, 8, 0.9

    def build(self):
        self.embedding = nn.Embedding(8, 16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch):
        tokens = tokens_of(batch[0])
        context = self.embedding(tokens).cumsum(1) / torch.arange(1, 13)[:, None]
        return F.cross_entropy(self.head(context).flatten(0, 1) / 4, tokens.flatten())


class Rotary(Row):
    """Rotary embedding far out in a sequence: its frequencies are a buffer."""

    def build(self):
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4)))
        self.qk, self.out = nn.Linear(4, 8), nn.Linear(4, NUM_CLASSES)

    def forward(self, x):
        angles = torch.outer(torch.arange(4000, 4003).float(), self.inv_freq).repeat(1, 2)
        q, k = self.qk(x.view(-1, 3, 4)).chunk(2, dim=-1)
        q, k = (t * angles.cos() + torch.cat([-t[..., 2:], t[..., :2]], -1) * angles.sin() for t in (q, k))
        return self.out((F.softmax(q @ k.transpose(1, 2), dim=-1) @ k).mean(1) + k.mean(1))


class MaskBuffer(Row):
    """Attention with a causal mask of -1e9."""

    def build(self):
        self.register_buffer("mask", torch.full((3, 3), -1e9).triu(1))
        self.qkv, self.out = nn.Linear(4, 24), nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        q, k, v = self.qkv(x.view(-1, 3, 4)).chunk(3, dim=-1)
        return self.out((F.softmax(q @ k.transpose(1, 2) / 3 + self.mask, dim=-1) @ v).sum(1))


class FilledMask(MaskBuffer):
    def forward(self, x):
        q, k, v = self.qkv(x.view(-1, 3, 4)).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) / 3).masked_fill(self.mask < 0, float("-inf"))
        return self.out((F.softmax(scores, dim=-1) @ v).sum(1))


class LargeTargets(Row):
    """Regression of numbers beyond 65,504, the largest of fp16."""

    lr = 0.05

    def build(self):
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))

    def train_dataloader(self):
        blobs = samples()
        targets = 1e5 * (blobs.images[:, :1] + blobs.images[:, 1:2]) + 2e5
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(blobs.images, targets), batch_size=8)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x).float(), y / 1e5)


class SmallTargets(LargeTargets):
    """Targets that differ in a digit that fp16 has not: 1000.1 is not 1000.4."""

    def train_dataloader(self):
        blobs = samples()
        targets = 1000 + (blobs.images[:, :1] + blobs.images[:, 1:2]) / 8
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(blobs.images, targets), batch_size=8)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x).float(), (y - 1000) * 8)


class DoubleTargets(LargeTargets):
    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), (y / 1e5).double())


class AutocastDisabled(Row):
    """A region that must be exact: `.float()` on all that goes in."""

    def build(self):
        super().build()
        self.weight = nn.Parameter(torch.randn(NUM_CLASSES, NUM_CLASSES) * 0.5)

    def forward(self, x):
        x = self.net(x)
        with torch.autocast(self.device.type, enabled=False):
            return x.float() @ self.weight.float()


class LayerWithoutAutocast(Row):
    """A layer in such a region is given fp32, as users of mixed precision do."""

    refused = HALF_SHOWS

    def forward(self, x):
        x = self.net[:2](x)
        with torch.autocast(self.device.type, enabled=False):
            return self.net[2](x.float())


class InPlaceSums(Row):
    """What is added up in a tensor of the user's own is fp32."""

    def build(self):
        self.layers = nn.ModuleList(nn.Linear(NUM_FEATURES, NUM_CLASSES) for _ in range(3))

    def forward(self, x):
        total = torch.zeros(len(x), NUM_CLASSES, device=self.device)
        for layer in self.layers:
            total += layer(x) / 3
        return total


class Penalty(Row):
    """Weight decay by hand, and a sparse first layer."""

    def loss(self, batch):
        decay = sum(p.pow(2).sum() for p in self.parameters())
        return super().loss(batch) + 1e-3 * decay + 1e-3 * self.net[0].weight.abs().sum()


class ParameterArithmetic(Row):
    """A layer whose weight is made of parameters: a low-rank product beside a mask and a scale."""

    def build(self):
        super().build()
        self.a, self.b = nn.Parameter(torch.randn(16, 2) * 0.1), nn.Parameter(torch.randn(2, NUM_FEATURES) * 0.1)
        self.gate = nn.Parameter(torch.zeros(16, 1))
        self.register_buffer("mask", (torch.rand(16, NUM_FEATURES) > 0.2).float())

    def forward(self, x):
        weight = (self.net[0].weight + self.a @ self.b) * self.mask * torch.sigmoid(self.gate)
        return self.net[2](F.relu(F.linear(x, weight, self.net[0].bias)))


class Einsum(Row):
    def build(self):
        self.w = nn.Parameter(torch.randn(NUM_FEATURES, NUM_CLASSES) * 0.3)
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(NUM_CLASSES))])

    def forward(self, x):
        return torch.einsum("bi,io->bo", x, self.w) + self.b[0]


class HalfLoss(Row):
    """The loss itself comes out of autocast in half precision."""

    falls_to = 0.8

    def loss(self, batch):
        x, y = batch
        return (2 - torch.tanh(self(x)) * (2 * F.one_hot(y, NUM_CLASSES) - 1)).mean()


class StraightThrough(Row):
    """Quantised weights, trained as if they were not."""

    def forward(self, x):
        weight = self.net[0].weight
        weight = weight + ((weight * 16).round() / 16 - weight).detach()
        return self.net[2](F.relu(F.linear(x, weight, self.net[0].bias)))


class OwnFunction(Row):
    """An autograd function of one's own that computes, and gives gradients, in fp32."""

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

    def build(self):
        super().build()
        self.weight = nn.Parameter(torch.randn(NUM_CLASSES, NUM_CLASSES) * 0.5)

    def forward(self, x):
        return self._Product.apply(self.net(x), self.weight)


class Maml(Row):
    """A step of SGD inside of the loss, differentiated through."""

    def loss(self, batch):
        x, y = batch
        names, weights = zip(*self.net.named_parameters(), strict=True)
        inner = F.cross_entropy(
            torch.func.functional_call(self.net, dict(zip(names, weights, strict=True)), x[:4]), y[:4]
        )
        gradients = torch.autograd.grad(inner, weights, create_graph=True)
        fast = {n: w - 0.1 * g for n, w, g in zip(names, weights, gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, fast, x[4:]), y[4:])


class DoubleParameter(Row):
    def build(self):
        super().build()
        self.shift = nn.Parameter(torch.zeros(NUM_CLASSES, dtype=torch.float64))

    def forward(self, x):
        return self.net(x) + self.shift


class FollowsWeights(Row):
    """Makes what it needs in the dtype of its weights, as libraries do."""

    def forward(self, x):
        dtype = next(self.parameters()).dtype
        x = x.to(dtype) + torch.zeros(NUM_FEATURES, dtype=dtype, device=self.device)
        lowest = torch.finfo(dtype).min
        return self.net(x.masked_fill(x < lowest / 2, 0.0)) + torch.zeros(1).type_as(self.net[2].bias)


class Contrast(Row):
    """SimCLR: embeddings of all ranks are gathered, with gradients."""

    epochs, worlds, lr, falls_to = 6, (2,), 0.02, 0.9
    roundings = 24  # gradients of logits that are five times a product
    ignored_warnings = ("torch.distributed.nn.functional.all_gather is deprecated",)

    def loss(self, batch):
        x, _ = batch
        one, other = (F.normalize(self.net(t).float(), dim=-1) for t in (x, x * 1.1 + 0.05))
        others = self.all_gather(other, sync_grads=True).flatten(0, 1)
        return F.cross_entropy(one @ others.t() * 5, torch.arange(len(x)) + len(x) * self.global_rank)
