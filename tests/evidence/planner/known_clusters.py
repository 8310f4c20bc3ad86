"""Clusters of conf/cluster and networks by name, for comparisons with published results."""

from functools import cache

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from lightning_hybrid.planning.estimates.layers import Layer, layers_of
from lightning_hybrid.planning.model.cluster import Cluster
from recipes.networks.alexnet import AlexNetBN
from recipes.networks.resnet import ResNet
from tests.checkout import ROOT

CLUSTERS = ROOT / "conf" / "cluster"
IMAGE = (3, 224, 224)


def cluster_of(name: str, num_nodes: int) -> Cluster:
    """Return a cluster of conf/cluster with the given number of nodes."""
    cfg = OmegaConf.load(CLUSTERS / f"{name}.yaml")
    cfg.num_nodes = num_nodes
    result: Cluster = instantiate(cfg.links)
    return result


def vgg16() -> nn.Module:
    """Make VGG-16 (Simonyan and Zisserman 2014, arXiv:1409.1556), which has 138,357,544 parameters.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in vgg16().parameters())
    138357544
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


@cache
def network(name: str) -> tuple[Layer, ...]:
    """Return the layers of a network by name."""
    model: nn.Module
    with torch.device("meta"):
        if name == "vgg16":
            model = vgg16()
        elif name == "alexnet_bn":  # the 62 million parameters of the authors' article
            model = AlexNetBN(
                num_classes=1000,
                in_channels=3,
                image_size=224,
                stem_kernel=11,
                stem_stride=4,
                stem_padding=2,
                conv2_kernel=5,
                pool_padding=0,
            )
        else:
            model = ResNet(depth=int(name.removeprefix("resnet")), num_classes=1000)
    return tuple(layers_of(model, IMAGE))


def num_tensors(layers: tuple[Layer, ...]) -> int:
    """Count the parameter tensors."""
    return sum(len(layer.numels) for layer in layers)


def bus_gb_per_s(cluster: Cluster, algorithm: str, num_bytes: float) -> float:
    """Return the bus bandwidth as defined by nccl-tests: 2 (P - 1) / P of the bytes, divided by the time."""
    ranks = cluster.world_size
    return 2 * (ranks - 1) / ranks * num_bytes / cluster.alone_s(algorithm, num_bytes) / 1e9
