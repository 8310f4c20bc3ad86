"""One run of eight nodes in one process: their steps one after the other, and what they send each other counted.

synchronous     one network; gradients of all images of an update, in batches of 128 (BatchNorm's batch) added up
local           eight networks, each with an optimizer; after H steps the mean of weights, statistics and momentum

Rates rise for a tenth of the run and then fall linearly to zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from lightning_hybrid.comm import Topology, traffic_of
from lightning_hybrid.comm.codec.block_format import OF_A_SUM, num_blocks_of
from lightning_hybrid.comm.codec.codec import Codec, Coder
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.data.in_memory.loader import EvalLoader, Normalize, TrainLoader
from lightning_hybrid.optim import LARS, WarmupPolynomialDecay, param_groups
from lightning_hybrid.strategy.local_steps.outer_step import OuterStep
from recipes.datasets.glyphs import glyphs_split
from recipes.networks.alexnet import AlexNetBN

NUM_NODES, BATCH_SIZE, NUM_EPOCHS = 8, 128, 8
NODES = Topology.from_ranks_per_node(rank=0, world_size=NUM_NODES, ranks_per_node=1)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to train on 131,072 images in 8 epochs.

    `images_per_update`: of a synchronous update. `every`: local steps from one mean to the next; 0: all synchronous.
    `images_per_step`: of one local step. `from_share`: share of the run after which steps are local. `outer`: rate and
    momentum of the outer step. `bits`: in which weights and momentum are sent. `keeps_momentum`: whether each node has
    its own.
    """

    images_per_update: int = NUM_NODES * BATCH_SIZE
    every: int = 0
    images_per_step: int = BATCH_SIZE
    from_share: float = 0.0
    outer: tuple[float, float] | None = None
    bits: Literal[8, 4] | None = None
    keeps_momentum: bool = False


ARMS = {
    "synchronous, 128 images": Arm(images_per_update=128),
    "synchronous, 1,024 images": Arm(images_per_update=1024),
    "synchronous, 8,192 images": Arm(images_per_update=8192),
    "8 steps of 128 images": Arm(every=8),
    "16 steps of 64": Arm(every=16, images_per_step=64),
    "16 steps of 64, int8": Arm(every=16, images_per_step=64, bits=8),
    "16 steps of 64, int8, own momentum": Arm(every=16, images_per_step=64, bits=8, keeps_momentum=True),
    "16 steps of 64, int4": Arm(every=16, images_per_step=64, bits=4),
    "16 steps of 64, int8, outer step 0.7, 0.9": Arm(every=16, images_per_step=64, bits=8, outer=(0.7, 0.9)),
    "6 steps of 64, int4": Arm(every=6, images_per_step=64, bits=4),
    "4 steps of 64, int4": Arm(every=4, images_per_step=64, bits=4),
    "8 steps of 128 from half of the run on": Arm(every=8, from_share=0.5),
}


class Node:
    """The network, optimizer and schedule of a node."""

    def __init__(self, network: nn.Module, kind: str, lr: float, num_steps: int) -> None:
        self.network = network
        groups = param_groups(network, weight_decay=5e-4)
        if kind == "SGD":
            self.optimizer: Any = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        else:
            form: Any = {"direction": "orthogonal", "momentum_form": "lr_outside", "excluded_lr_mult": 0.01}
            self.optimizer = LARS(groups, lr=lr, momentum=0.9, **form)
        self.schedule = WarmupPolynomialDecay(
            self.optimizer, num_steps, warmup_steps=num_steps // 10, end_lr=0.0, power=1.0
        )

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Step along the mean gradient of several batches."""
        self.optimizer.zero_grad()
        for images, labels in batches:
            (F.cross_entropy(self.network(images), labels) / len(batches)).backward()
        self.optimizer.step()
        self.schedule.step()

    @property
    def weights(self) -> list[Tensor]:
        """The parameters."""
        return [parameter.detach() for parameter in self.network.parameters()]

    @property
    def statistics(self) -> list[Tensor]:
        """Running means and variances."""
        layers = [layer for layer in self.network.modules() if isinstance(layer, _BatchNorm)]
        return [one for layer in layers for one in (layer.running_mean, layer.running_var) if one is not None]

    @property
    def momenta(self) -> list[Tensor]:
        """The optimizer's state."""
        return [one["momentum_buffer"] for one in self.optimizer.state.values()]


def train(arm: Arm, kind: str, lr: float, seed: int) -> dict[str, Any]:
    """Train, and return accuracy on unseen fonts in percent, synchronisations, and the bytes that a node sends."""
    torch.manual_seed(seed)
    network = new_network()
    sets = glyphs_split()
    normalize = Normalize.fitted_to(sets["train"].images)
    num_images = len(sets["train"].labels) * NUM_EPOCHS
    size = arm.images_per_step
    of_nodes = [batches_of(sets["train"], normalize, size=size, seed=seed, rank=rank) for rank in range(NUM_NODES)]
    if arm.every:
        nodes, bytes_sent, num_syncs = _train_locally(arm, network, kind, lr, of_nodes, num_images)
    else:
        num_updates = num_images // arm.images_per_update
        nodes = [Node(network, kind, lr, num_updates)]
        bytes_sent, num_syncs = num_updates * bytes_of(nodes[0].weights), num_updates
        in_turn = (next(of_node) for _ in range(num_images) for of_node in of_nodes)
        for _ in range(num_updates):
            nodes[0].step([next(in_turn) for _ in range(arm.images_per_update // BATCH_SIZE)])
    found = {"num_syncs": num_syncs, "bytes": bytes_sent}
    trained = nodes[0].network
    for name in ("val", "test"):
        found[name] = accuracy(trained, sets[name], normalize)
    update_bn((images for images, _ in _first(sets["train"], normalize)), trained)
    return found | {"test_recalibrated": accuracy(trained, sets["test"], normalize)}


def _train_locally(
    arm: Arm, network: nn.Module, kind: str, lr: float, of_nodes: list[Iterator[Any]], num_images: int
) -> tuple[list[Node], float, int]:
    num_steps = num_images // (NUM_NODES * arm.images_per_step)
    from_step, bytes_sent, num_syncs = int(arm.from_share * num_steps), 0.0, 0
    first = Node(network, kind, lr, num_steps)
    for _ in range(from_step):
        first.step([next(of_node) for of_node in of_nodes])
        bytes_sent, num_syncs = bytes_sent + bytes_of(first.weights), num_syncs + 1
    nodes = [first, *(_copied(first, kind, lr, num_steps) for _ in range(NUM_NODES - 1))]
    lr_outside, momentum_outside = arm.outer or (1.0, 0.0)
    outers = [OuterStep(node.weights, lr=lr_outside, momentum=momentum_outside) for node in nodes]
    codec = None if arm.bits is None else Codec(bits=arm.bits)
    coder = None if codec is None else Coder(codec, torch.device("cpu"))
    for step in range(from_step, num_steps):
        for node, batches in zip(nodes, of_nodes, strict=True):
            node.step([next(batches)])
        if (step + 1 - from_step) % arm.every == 0 or step + 1 == num_steps:
            if coder is not None:
                coder.begin_step(step + 1)
            moved = [outer.moved(node.weights) for outer, node in zip(outers, nodes, strict=True)]
            momenta = [[] if arm.keeps_momentum else node.momenta for node in nodes]
            narrow = [[*some, *own] for some, own in zip(moved, momenta, strict=True)]
            average_(narrow, coder)
            for outer, some, node in zip(outers, moved, nodes, strict=True):
                outer.step_(node.weights, some)
            average_([node.statistics for node in nodes])
            bytes_sent += bytes_of(narrow[0], codec) + bytes_of(first.statistics)
            num_syncs += 1
    return nodes, bytes_sent, num_syncs


def _copied(node: Node, kind: str, lr: float, num_steps: int) -> Node:
    new = Node(copy.deepcopy(node.network), kind, lr, num_steps)
    new.optimizer.load_state_dict(copy.deepcopy(node.optimizer.state_dict()))
    new.schedule.load_state_dict(node.schedule.state_dict())
    return new


@torch.no_grad()
def average_(of_nodes: list[list[Tensor]], coder: Coder | None = None) -> None:
    """Give every node the mean of each tensor: the sum over nodes, through the codec, divided by their number."""
    rows = torch.stack([torch.cat([one.reshape(-1) for one in tensors]) for tensors in of_nodes])
    total = rows.sum(0) if coder is None else _sum_coded(rows, coder)
    for tensors in of_nodes:
        parts = total.div(len(of_nodes)).split([one.numel() for one in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _sum_coded(rows: Tensor, coder: Coder) -> Tensor:
    # As between more than two nodes: each encodes what it has, and owners encode the sums.
    messages = rows.new_empty((len(rows), coder.codec.message_bytes(rows.shape[1])), dtype=torch.uint8)
    ids = torch.arange(num_blocks_of(rows.shape[1]), dtype=torch.int32)
    for sender, (row, message) in enumerate(zip(rows, messages, strict=True)):
        Blocks.of(coder, row, ids).encode(row, message, sender=sender)
    total = torch.empty_like(rows[0])
    coder.add(messages, total)
    Blocks.of(coder, total, ids).encode(total, messages[0], sender=OF_A_SUM)
    coder.add(messages[:1], total)
    return total


def bytes_of(tensors: list[Tensor], codec: Codec | None = None) -> float:
    """Return what a node sends to the others, in fp32 or through the codec, for one sum of these tensors over nodes."""
    numel = sum(map(torch.numel, tensors))
    across = 4.0 * numel if codec is None else float(codec.message_bytes(numel))
    return traffic_of("parallel_flat", NODES, 4.0 * numel, num_bytes_across=across, is_ring=codec is None).across


def new_network() -> AlexNetBN:
    """Return the network for glyphs."""
    return AlexNetBN(
        num_classes=32, in_channels=1, image_size=32, width=0.0625, stem_kernel=3, stem_stride=2, dropout=0.0
    )


def batches_of(
    image_set: Any, normalize: Normalize, *, size: int, seed: int, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what one node trains on, in `size` images."""
    loader = TrainLoader(
        image_set,
        global_batch_size=NUM_NODES * size,
        world_size=NUM_NODES,
        rank=rank,
        accumulate_grad_batches=1,
        seed=seed,
        shift_pixels=1,
        normalize=normalize,
    )
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        yield from loader


def _first(image_set: Any, normalize: Normalize) -> Iterator[tuple[Tensor, Tensor]]:
    for begin in range(0, 2048, BATCH_SIZE):
        yield normalize(image_set.images[begin : begin + BATCH_SIZE]), image_set.labels[begin : begin + BATCH_SIZE]


@torch.no_grad()
def accuracy(network: nn.Module, image_set: Any, normalize: Normalize) -> float:
    """Return the share of right answers in percent."""
    network.eval()
    loader = EvalLoader(image_set, world_size=1, rank=0, batch_size_per_rank=512, normalize=normalize)
    right = sum(int((network(images).argmax(1) == labels).sum()) for images, labels in loader)
    network.train()
    return 100 * right / len(image_set.labels)
