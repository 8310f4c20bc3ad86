"""Simulator compared with published results, without fitting, as checked by `tests/recipes/test_simulate.py`.

The rows of the record state the published values, sources and assumptions. This module computes the prediction of each
row with the constants of conf/cluster.
"""

from collections.abc import Iterator
from dataclasses import replace

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.estimates.layers import flops_per_image, work_of
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.simulate import SimulatedSteps, simulate
from tests.evidence.planner.known_clusters import (
    bus_gb_per_s,
    cluster_of,
    network,
    num_tensors,
)

Prediction = tuple[str, float]

TRAIN_IMAGES = 1_281_167  # images of ImageNet
P40_IMAGES_PER_S = 218  # at 64 images; see conf/cluster/p40_roce.yaml
# ResNet-50 on a P100 with 32 and with 64 images, from the TensorFlow 1 benchmarks page
P100_32_OVER_64 = 195 / 219
SMALL_LL_BYTES = 16384  # default of NCCL_LL_THRESHOLD in 2018
RESNET_CUT = 76  # tensors from the input; in the article, between 76 and 77
# Fully connected layers begin here. In the article the cut is between 20 and 21, because its network has five
# convolutions with weight and bias and five normalizations with two tensors. Here there are six normalizations and no
# bias.
ALEXNET_CUT = 17


def jia(
    net: str,
    *,
    num_nodes: int,
    batch: int,
    images_per_s: float,
    cut: int | None,
    ll_up_to_bytes: int = SMALL_LL_BYTES,
) -> SimulatedSteps:
    """Simulate P40s with fp16 gradients and their hierarchical all-reduce in two segments at `cut`.

    If `cut` is None, simulate NCCL's ring for each tensor.
    """
    cluster = cluster_of("p40_roce", num_nodes)
    layers = network(net)
    work = work_of(layers, batch_size=batch, images_per_s=images_per_s)
    if cut is not None:
        cuts = [num_tensors(layers) - cut]
        return simulate(work, cluster, CommPlan(), itemsize=2, algorithm="hierarchical", cuts=cuts)
    assert isinstance(cluster.transport, Nccl)
    of_2018 = replace(cluster, transport=replace(cluster.transport, ll_up_to_bytes=ll_up_to_bytes))
    cuts = list(range(1, num_tensors(layers)))
    return simulate(work, of_2018, CommPlan(), itemsize=2, algorithm="nccl_ring", cuts=cuts)


def jia_rows() -> Iterator[Prediction]:
    """Yield predictions for the paper's cluster at 1,024 and 2,048 ranks."""
    at_64 = P40_IMAGES_PER_S
    at_32 = P40_IMAGES_PER_S * P100_32_OVER_64
    steps = 90 * TRAIN_IMAGES / 65536
    ours = jia("resnet50", num_nodes=128, batch=64, images_per_s=at_64, cut=RESNET_CUT)
    base = jia("resnet50", num_nodes=128, batch=64, images_per_s=at_64, cut=None)
    simple = jia(
        "resnet50", num_nodes=128, batch=64, images_per_s=at_64, cut=None, ll_up_to_bytes=0
    )
    twice = jia("resnet50", num_nodes=256, batch=32, images_per_s=at_32, cut=RESNET_CUT)
    yield "ResNet-50, 1,024 P40, all on: efficiency", 100 * ours.efficiency
    yield "ResNet-50, 1,024 P40, baseline: efficiency", 100 * base.efficiency
    yield "ResNet-50, 1,024 P40, baseline without LL: efficiency", 100 * simple.efficiency
    yield "ResNet-50, 1,024 P40: speed-up over NCCL", base.step_s / ours.step_s
    yield "ResNet-50, 1,024 P40: 90 epochs", steps * ours.step_s / 60
    yield "ResNet-50, 2,048 P40: efficiency, one account", 100 * twice.efficiency
    yield "ResNet-50, 2,048 P40: efficiency, the other", 100 * twice.efficiency
    yield "ResNet-50, 2,048 P40: 90 epochs", steps * twice.step_s / 60
    rate = (
        P40_IMAGES_PER_S
        * flops_per_image(network("resnet50"))
        / flops_per_image(network("alexnet_bn"))
    )
    fast = jia("alexnet_bn", num_nodes=128, batch=64, images_per_s=rate, cut=ALEXNET_CUT)
    slow = jia("alexnet_bn", num_nodes=128, batch=64, images_per_s=rate, cut=None)
    yield "AlexNet, 1,024 P40: speed-up over NCCL", slow.step_s / fast.step_s
    yield "AlexNet, 1,024 P40: 95 epochs", 95 * TRAIN_IMAGES / 65536 * fast.step_s / 60


def training_rows() -> Iterator[Prediction]:
    """Yield predictions of the scaling of whole training runs of other authors."""
    cluster = cluster_of("p100_25gbe", 128)
    plan = CommPlan(bucket_bytes=64 * MIB, num_buckets=1, last_bucket_bytes=64 * MIB)
    flops = {depth: flops_per_image(network(f"resnet{depth}")) for depth in (50, 101, 152)}
    seconds = 1 / 219 + (1 / 91.8 - 1 / 219) * (flops[101] - flops[50]) / (flops[152] - flops[50])
    for net, rate in (("resnet101", 1 / seconds), ("vgg16", 154.0)):
        work = work_of(network(net), batch_size=64, images_per_s=rate)
        result = simulate(work, cluster, plan, itemsize=4, algorithm="nccl_ring")
        yield f"{net}, 512 Pascal: efficiency", 100 * result.efficiency
    goyal = replace(
        cluster_of("p100_25gbe", 32),
        ranks_per_node=8,
        across=Link(latency_s=20e-6, bytes_per_s=6.25e9),
    )
    work = work_of(network("resnet50"), batch_size=32, images_per_s=195.0)
    result = simulate(
        work, goyal, CommPlan(num_buckets=1), itemsize=4, algorithm="halving_doubling"
    )
    yield "ResNet-50, 256 P100: efficiency", 100 * result.efficiency
    edr = Link(latency_s=0.0, bytes_per_s=12.5e9)
    nccl = Nccl(inside="nvlink", generation="volta", fabric="ib")
    sony = replace(
        cluster_of("cloud_100gbe", 272),
        ranks_per_node=4,
        nics_per_node=2,
        across=edr,
        transport=nccl,
    )
    work = work_of(network("resnet50"), batch_size=32, images_per_s=1200.0)
    result = simulate(work, sony, CommPlan(num_buckets=1), itemsize=2, algorithm="two_level")
    yield "ResNet-50, 1,088 V100, 2D torus: efficiency", 100 * result.efficiency


def nccl_rows() -> Iterator[Prediction]:
    """Yield predictions of NCCL's own tests: between nodes, also at the size of a bucket, and inside a node."""
    h100 = replace(cluster_of("dgx_h100", 5), nics_per_node=4)
    a100 = cluster_of("dgx_a100", 2)
    hdr = replace(cluster_of("dgx_a100", 3), nics_per_node=4)
    tcp = cluster_of("cloud_100gbe", 4)
    gib = 2**30
    for algorithm in ("ring", "tree"):
        gb_per_s = bus_gb_per_s(h100, f"nccl_{algorithm}", gib)
        yield f"5 x 8 H100, 4 x 400G, {algorithm}, 1 GiB", gb_per_s
    yield "5 x 8 H100, 4 x 400G, ring, 1 MiB", 1e6 * h100.alone_s("nccl_ring", MIB)
    yield "2 x DGX A100, ring, 8 B", 1e6 * a100.alone_s("nccl_ring", 8)
    yield "DGX A100, 8 x 200G, all-reduce, large", bus_gb_per_s(a100, "nccl_ring", 8 * gib)
    yield "3 x 8 A100, 4 x HDR, peak", bus_gb_per_s(hdr, "nccl_ring", 8 * gib)
    yield "4 x 8 V100, 100 Gbit/s TCP, large", bus_gb_per_s(tcp, "nccl_ring", gib)
    for name, num_nodes, cards in (
        ("h100", 2, 400),
        ("h100", 4, 400),
        ("h100", 8, 400),
        ("a100", 2, 200),
    ):
        result = cluster_of(f"dgx_{name}", num_nodes).alone_s("nccl", 16 * MIB)
        yield f"{num_nodes} x 8 {name.upper()}, 8 x {cards}G, 16 MiB", 1e6 * result
    for name, gpus in (("dgx_a100", "8 A100"), ("hgx_h200", "8 H200"), ("hgx_b200", "8 B200")):
        for kib in (32, 1024, 131072, 2097152):
            time_s = cluster_of(name, 1).alone_s("nccl", kib * 1024)
            yield f"{gpus}, one node, {kib} KiB", 1e6 * time_s


def predictions() -> list[Prediction]:
    """Return all predictions in the order of the record's rows."""
    return [*jia_rows(), *training_rows(), *nccl_rows()]
