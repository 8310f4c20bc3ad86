"""Networks as users write them, and one step of each with `GlobalBatch` and with all activations kept."""

import copy
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.contrastive import GlobalBatch, InfoNCE
from tests.scenes import same, this_rank

PAIRS = 12
CHUNK = 4
FEATURES = 8


class Network(nn.Module):
    """Network that embeds two views of the rows of a batch."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), *layers, nn.Tanh(), nn.Linear(16, 6))

    def noisy(self, x):
        return x

    def embed(self, x):
        return self.net(self.noisy(x)), self.net(self.noisy(x.flip(1)))


class PythonsRandom(Network):
    def noisy(self, x):
        return x * torch.tensor([random.random() < 0.7 for _ in range(x.shape[1])])


class NumPysRandom(Network):
    def noisy(self, x):
        return x + torch.from_numpy(np.random.standard_normal(x.shape)).float()


class OwnGenerator(Network):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def noisy(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class Augmentations:
    def __init__(self):
        self.generators = {"noise": np.random.default_rng(3), "mask": random.Random(4)}
        self.legacy = [np.random.RandomState(5)]
        self.shift = partial(torch.randn, 1, generator=torch.Generator().manual_seed(6))

    def __call__(self, x):
        keep = self.generators["mask"].random() < 0.5
        noise = self.generators["noise"].normal(size=x.shape) + self.legacy[0].normal()
        return x * keep + torch.from_numpy(noise).float() + self.shift()


class GeneratorsOfHelpers(Network):
    def __init__(self):
        super().__init__()
        self.augment = Augmentations()

    def noisy(self, x):
        return self.augment(x)


class OldSpectralNorm(Network):
    def __init__(self):
        super().__init__()
        nn.utils.spectral_norm(self.net[0])


class SpectralNorm(Network):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.net[0])


class WeightNorm(Network):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[0])


class Normalized(Network):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(16))


class Checkpointed(Network):
    def __init__(self, use_reentrant):
        super().__init__(nn.Dropout())
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.use_reentrant = use_reentrant

    def embed(self, x):
        return tuple(
            checkpoint(self.net, self.stem(view), use_reentrant=self.use_reentrant)
            for view in (x, x.flip(1))
        )


class GradientHooks(Network):
    """Network with hooks, of which one scales a gradient and another one keeps it."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.net[0].weight.register_hook(lambda grad: 0.5 * grad)
        self.net[2].weight.register_post_accumulate_grad_hook(
            lambda p: self.calls.append(p.grad.clone())
        )


class Recurrent(Network):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)

    def embed(self, x):
        return self.states(x), self.states(x.flip(1))

    def states(self, x):
        states, _ = self.lstm(x.view(len(x), 4, 2))
        return states.flatten(1)


class ListOfWeights(Network):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))
        self.shortcuts = [self.weight]

    def noisy(self, x):
        return x @ self.shortcuts[0]


class ShortWords(Network):
    """Network with an embedding that rescales its rows in forward."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, FEATURES, max_norm=0.5)

    def noisy(self, x):
        return x + self.words((x.abs() * 9).long().clamp(max=9)[:, 0])


class HiddenTeacher(Network):
    """Network with a queue of outputs of a teacher, which is in training mode and excluded from checkpoints."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(16))
        self.hidden = [copy.deepcopy(self.net).requires_grad_(False)]
        self.register_buffer("queue", torch.randn(PAIRS, 6))

    def embed(self, x):
        with torch.no_grad():
            keys = self.hidden[0](x)
        similarities = self.net(x) @ self.queue.T
        self.queue = torch.cat([keys, self.queue])[:PAIRS]
        return similarities, similarities.detach() + keys @ self.queue.T


class MovingCenter(Network):
    """Network with a moving center of a teacher's outputs, which is initialized by the first batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", None)

    def embed(self, x):
        student = self.net(x)
        teacher = self.net(x.flip(1)).detach()
        if self.center is None:
            self.center = teacher.mean(0)
        teacher = teacher - self.center
        self.center.data.mul_(0.9).add_(0.1 * teacher.mean(0))
        return student, teacher


NETWORKS = {
    "plain": Network,
    "dropout": partial(Network, nn.Dropout()),
    "Python's random": PythonsRandom,
    "NumPy's random": NumPysRandom,
    "a generator of its own": OwnGenerator,
    "generators of a helper": GeneratorsOfHelpers,
    "BatchNorm": Normalized,
    "spectral norm, old": OldSpectralNorm,
    "spectral norm": SpectralNorm,
    "weight norm": WeightNorm,
    "reentrant checkpoint": partial(Checkpointed, True),
    "checkpoint": partial(Checkpointed, False),
    "gradient hooks": GradientHooks,
    "LSTM": Recurrent,
    "a list of weights": ListOfWeights,
    "embedding with max_norm": ShortWords,
    "hidden teacher and queue": HiddenTeacher,
    "moving center": MovingCenter,
}
DEPENDS_ON_PARTS = {
    "BatchNorm",
    "spectral norm, old",
    "spectral norm",
    "hidden teacher and queue",
    "moving center",
}
DRAWS = {
    "dropout",
    "Python's random",
    "NumPy's random",
    "a generator of its own",
    "generators of a helper",
    "reentrant checkpoint",
    "checkpoint",
}


def data(num_pairs=PAIRS):
    return torch.randn(num_pairs, FEATURES, generator=torch.Generator().manual_seed(1))


def seed():
    torch.manual_seed(7 + this_rank())
    np.random.seed(8 + this_rank())
    random.seed(9 + this_rank())


def drawn():
    return torch.rand(1).item(), np.random.rand(), random.random()


@dataclass
class State:
    """Gradients, buffers and random streams after a step."""

    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    drawn: tuple[float, float, float]  # next number of each global stream
    generators: list[torch.Tensor]  # states of the network's own generators


def state_after(network):
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    buffers = dict(network.named_buffers())
    for hidden in getattr(network, "hidden", []):
        buffers |= {f"hidden.{name}": buffer for name, buffer in hidden.named_buffers()}
    generators = []
    if hasattr(network, "generator"):
        generators.append(network.generator.get_state())
    return State(grads, buffers, drawn(), generators)


LOSS = InfoNCE(0.5, block=2)


def seeded(make):
    torch.manual_seed(0)
    network = make()
    seed()
    return network


def nothing(network):
    pass


def with_activations_kept(make, x, chunk=CHUNK, between=nothing):
    """Make a step and return its state. `between(network)` is called between forward and backward."""
    network = seeded(make)
    parts = [network.embed(part) for part in x.split(chunk)]
    loss = LOSS(*map(torch.cat, zip(*parts, strict=True)))
    between(network)
    loss.backward()
    return state_after(network)


def with_global_batch(make, x, chunk=CHUNK, between=nothing):
    """Make the same step with `GlobalBatch` and return its state."""
    network = seeded(make)
    loss = GlobalBatch(LOSS, chunk=chunk)(network.embed, x)
    between(network)
    loss.backward()
    return state_after(network)


def assert_same_step(result, expected):
    assert result.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert (result.grads[name] - grad).norm() <= 1e-6 * grad.norm() + 1e-9, name
    assert same(result.buffers, expected.buffers)
    assert result.drawn == expected.drawn
    assert same(result.generators, expected.generators)
