"""Published results of clusters that we do not have, and the model's prediction of each; see `published`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.cost import Link
from lightning_hybrid.planning.cost_nccl import Nccl
from lightning_hybrid.planning.simulate import SimulatedSteps, simulate
from recipes.planning.layers import flops_per_image, work_of
from tests.evidence.planner.known_clusters import PublishedRow, bus_gb_per_s, cluster_of, network, num_tensors

TRAIN_IMAGES = 1_281_167  # images of ImageNet
P40_IMAGES_PER_S = 218  # at 64 images; see conf/cluster/p40_roce.yaml
P100_32_OVER_64 = 195 / 219  # ResNet-50 on a P100 at 32 and at 64 images, TensorFlow 1 benchmarks page
SMALL_LL_BYTES = 16384  # NCCL_LL_THRESHOLD's default in 2018

# ---- Jia et al. 2018 -------------------------------------------------------------------------------------------------

JIA = "Jia et al. 2018, arXiv:1807.11205"
RESNET_CUT = 76  # tensors, from the input; the article: between 76 and 77
ALEXNET_CUT = 17  # where fully connected layers begin. The article: between 20 and 21, which is there where five
# convolutions have weight and bias and five normalisations two tensors; here six normalisations and no bias


def jia(
    net: str, *, num_nodes: int, batch: int, images_per_s: float, cut: int | None, ll_up_to_bytes: int = SMALL_LL_BYTES
) -> SimulatedSteps:
    """Simulate P40s with fp16 gradients. `cut`: theirs, hierarchical in two segments; None: NCCL's ring by tensor."""
    cluster, layers = cluster_of("p40_roce", num_nodes), network(net)
    work = work_of(layers, batch_size=batch, images_per_s=images_per_s)
    if cut is not None:
        cuts = [num_tensors(layers) - cut]
        return simulate(work, cluster, CommPlan(), itemsize=2, algorithm="hierarchical", cuts=cuts)
    assert isinstance(cluster.transport, Nccl)
    of_2018 = replace(cluster, transport=replace(cluster.transport, ll_up_to_bytes=ll_up_to_bytes))
    cuts = list(range(1, num_tensors(layers)))
    return simulate(work, of_2018, CommPlan(), itemsize=2, algorithm="nccl_ring", cuts=cuts)


def jia_rows() -> Iterator[PublishedRow]:
    """Yield their cluster at 1,024 and 2,048 ranks."""
    at_64, at_32 = P40_IMAGES_PER_S, P40_IMAGES_PER_S * P100_32_OVER_64
    steps = 90 * TRAIN_IMAGES / 65536
    ours = jia("resnet50", num_nodes=128, batch=64, images_per_s=at_64, cut=RESNET_CUT)
    base = jia("resnet50", num_nodes=128, batch=64, images_per_s=at_64, cut=None)
    twice = jia("resnet50", num_nodes=256, batch=32, images_per_s=at_32, cut=RESNET_CUT)
    reviews = "reviews of the paper"
    note = "segments cut between tensors 76 and 77; a message's latency is NCCL's, theirs was their own over RDMA"
    yield PublishedRow("ResNet-50, 1,024 P40, all on: efficiency", reviews, "%", 99.2, 100 * ours.efficiency, note=note)
    note = "each of 161 tensors by NCCL's ring, LL up to 16 KiB; no time of the framework's own per tensor"
    yield PublishedRow(
        "ResNet-50, 1,024 P40, baseline: efficiency", reviews, "%", 9.0, 100 * base.efficiency, note=note
    )
    simple = jia("resnet50", num_nodes=128, batch=64, images_per_s=at_64, cut=None, ll_up_to_bytes=0)
    yield PublishedRow(
        "ResNet-50, 1,024 P40, baseline without LL: efficiency",
        reviews,
        "%",
        9.0,
        100 * simple.efficiency,
        note="as above, but protocol Simple for all sizes",
    )
    yield PublishedRow(
        "ResNet-50, 1,024 P40: speed-up over NCCL", JIA, "x", 11, base.step_s / ours.step_s, note='"up to"'
    )
    minutes = steps * ours.step_s / 60
    yield PublishedRow(
        "ResNet-50, 1,024 P40: 90 epochs",
        "recalled from the paper",
        "min",
        8.7,
        minutes,
        note="not independent: 218 images/s is recalled from the same paper; steps only, no start, no evaluation",
    )
    note = "communication alone: ranks of equal pace"
    yield PublishedRow(
        "ResNet-50, 2,048 P40: efficiency, one account",
        "recalled from the paper",
        "%",
        87.9,
        100 * twice.efficiency,
        note=note,
    )
    yield PublishedRow(
        "ResNet-50, 2,048 P40: efficiency, the other",
        "the authors' article, 30 Jul 2018",
        "%",
        97,
        100 * twice.efficiency,
        note=note,
    )
    minutes = steps * twice.step_s / 60
    note = "the P40's rate at 32 images is not published: that at 64 times a P100's ratio (195 / 219); steps only"
    yield PublishedRow("ResNet-50, 2,048 P40: 90 epochs", JIA, "min", 6.6, minutes, note=note)
    rate = P40_IMAGES_PER_S * flops_per_image(network("resnet50")) / flops_per_image(network("alexnet_bn"))
    fast = jia("alexnet_bn", num_nodes=128, batch=64, images_per_s=rate, cut=ALEXNET_CUT)
    slow = jia("alexnet_bn", num_nodes=128, batch=64, images_per_s=rate, cut=None)
    note = "the P40's rate on AlexNet is not published: the FLOP/s that it makes of ResNet-50"
    yield PublishedRow(
        "AlexNet, 1,024 P40: speed-up over NCCL", JIA, "x", 3, slow.step_s / fast.step_s, note='"up to"; ' + note
    )
    minutes = 95 * TRAIN_IMAGES / 65536 * fast.step_s / 60
    note += "; steps only"
    yield PublishedRow("AlexNet, 1,024 P40: 95 epochs", JIA, "min", 4, minutes, note=note)


# ---- others ----------------------------------------------------------------------------------------------------------


def training_rows() -> Iterator[PublishedRow]:
    """Yield the scaling of whole training."""
    horovod = "Horovod, docs/benchmarks.rst: 128 servers with 4 Pascal, 25 GbE RoCE"
    cluster, plan = (
        cluster_of("p100_25gbe", 128),
        CommPlan(bucket_bytes=64 * MIB, num_buckets=1, last_bucket_bytes=64 * MIB),
    )
    flops = {depth: flops_per_image(network(f"resnet{depth}")) for depth in (50, 101, 152)}
    seconds = 1 / 219 + (1 / 91.8 - 1 / 219) * (flops[101] - flops[50]) / (flops[152] - flops[50])
    for net, rate, published, note in (
        ("resnet101", 1 / seconds, 90, "rate of one GPU between ResNet-50's and -152's, by FLOPs"),
        ("vgg16", 154.0, 68, "rate of one GPU: TensorFlow 1 benchmarks page"),
    ):
        work = work_of(network(net), batch_size=64, images_per_s=rate)
        found = simulate(work, cluster, plan, itemsize=4, algorithm="nccl_ring")
        note += "; fp32, fused to 64 MiB, 64 images; no cycle time, no negotiation"
        yield PublishedRow(f"{net}, 512 Pascal: efficiency", horovod, "%", published, 100 * found.efficiency, note=note)
    goyal = replace(cluster_of("p100_25gbe", 32), ranks_per_node=8, across=Link(latency_s=20e-6, bytes_per_s=6.25e9))
    work = work_of(network("resnet50"), batch_size=32, images_per_s=195.0)
    found = simulate(work, goyal, CommPlan(num_buckets=1), itemsize=4, algorithm="halving_doubling")
    note = "8 GPUs on PCIe, 50 GbE at 20 us, halving-doubling, 195 images/s alone (a P100 at 32 images, TensorFlow 1)"
    yield PublishedRow(
        "ResNet-50, 256 P100: efficiency",
        "Goyal et al. 2017, arXiv:1706.02677",
        "%",
        90,
        100 * found.efficiency,
        note=note,
    )
    sony = replace(
        cluster_of("cloud_100gbe", 272),
        ranks_per_node=4,
        nics_per_node=2,
        across=Link(latency_s=0.0, bytes_per_s=12.5e9),
        transport=Nccl(inside="nvlink", generation="volta", fabric="ib"),
    )
    work = work_of(network("resnet50"), batch_size=32, images_per_s=1200.0)
    found = simulate(work, sony, CommPlan(num_buckets=1), itemsize=2, algorithm="two_level")
    note = "4 V100 with NVLink and 2 x EDR per node; 1,200 images/s alone is PyTorch's AMP, not theirs; our two_level"
    yield PublishedRow(
        "ResNet-50, 1,088 V100, 2D torus: efficiency",
        "Mikami et al. 2018, arXiv:1811.05233",
        "%",
        91.62,
        100 * found.efficiency,
        note=note,
    )


def bus_rows() -> Iterator[PublishedRow]:
    """Yield NCCL's own tests between nodes."""
    h100 = replace(cluster_of("dgx_h100", 5), nics_per_node=4)
    gib = 2**30
    for algorithm, published in (("nccl_ring", 190), ("nccl_tree", 150)):
        yield PublishedRow(
            f"5 x 8 H100, 4 x 400G, {algorithm[5:]}, 1 GiB",
            "NVIDIA/nccl issue 1368",
            "GB/s",
            published,
            bus_gb_per_s(h100, algorithm, gib),
        )
    yield PublishedRow(
        "5 x 8 H100, 4 x 400G, ring, 1 MiB", "NVIDIA/nccl issue 1368", "us", 354.9, 1e6 * h100.alone_s("nccl_ring", MIB)
    )
    a100 = cluster_of("dgx_a100", 2)
    yield PublishedRow(
        "2 x DGX A100, ring, 8 B", "NVIDIA/nccl issue 812", "us", 93.12, 1e6 * a100.alone_s("nccl_ring", 8)
    )
    yield PublishedRow(
        "DGX A100, 8 x 200G, all-reduce, large",
        "NVIDIA/nccl issue 812, NVIDIA's comment",
        "GB/s",
        192,
        bus_gb_per_s(a100, "nccl_ring", 8 * gib),
    )
    hdr = replace(cluster_of("dgx_a100", 3), nics_per_node=4)
    yield PublishedRow(
        "3 x 8 A100, 4 x HDR, peak", "NVIDIA/nccl-tests issue 119", "GB/s", 96, bus_gb_per_s(hdr, "nccl_ring", 8 * gib)
    )
    tcp = cluster_of("cloud_100gbe", 4)
    note = "the middle of 4 to 6; the model has the line rate, kernel TCP over few sockets does not reach it"
    yield PublishedRow(
        "4 x 8 V100, 100 Gbit/s TCP, large",
        "NVIDIA/nccl issue 450",
        "GB/s",
        5,
        bus_gb_per_s(tcp, "nccl_ring", gib),
        note=note,
    )


# us of one all-reduce of 16 MiB by NCCL's own choice; all of 1 to 128 MiB: tests/comm/engine/test_cuda_defaults.py.
BETWEEN_NODES_US = (
    ("dgx_h100", 2, "8 x 400G", "NVIDIA/nccl-tests issue 309", 183.8),
    ("dgx_h100", 4, "8 x 400G", "NVIDIA/nccl-tests issue 309", 258.3),
    ("dgx_h100", 8, "8 x 400G", "NVIDIA/nccl-tests issue 309", 373.5),
    ("dgx_a100", 2, "8 x 200G", "oracle-quickstart/oci-hpc-oke, README", 265.9),
)


def between_rows() -> Iterator[PublishedRow]:
    """Yield NCCL's tests between nodes, at the size of a bucket."""
    for name, num_nodes, cards, source, published in BETWEEN_NODES_US:
        yield PublishedRow(
            f"{num_nodes} x 8 {name[4:].upper()}, {cards}, 16 MiB",
            source,
            "us",
            published,
            1e6 * cluster_of(name, num_nodes).alone_s("nccl", 16 * MIB),
        )


# us of one all-reduce on one node of 8, by KiB.
ONE_NODE_US = {
    "dgx_a100": ("8 A100", {32: 43.8, 1024: 101.9, 131072: 1327.6, 2097152: 16240.0}),
    "hgx_h200": ("8 H200", {32: 39.8, 1024: 46.0, 131072: 584.4, 2097152: 8010.1}),
    "hgx_b200": ("8 B200", {32: 47.8, 1024: 50.9, 131072: 413.2, 2097152: 5113.3}),
}


def one_node_rows() -> Iterator[PublishedRow]:
    """Yield NCCL's tests inside a node."""
    for name, (what, times_us) in ONE_NODE_US.items():
        found = cluster_of(name, 1)
        for kib, published in times_us.items():
            yield PublishedRow(
                f"{what}, one node, {kib} KiB",
                "stas00/ml-engineering, network",
                "us",
                published,
                1e6 * found.alone_s("nccl", kib * 1024),
                note="the published loop waits after each sum, which costs a launch of some 25 us",
            )


def published_rows() -> list[PublishedRow]:
    """Return all rows."""
    return [*jia_rows(), *training_rows(), *bus_rows(), *between_rows(), *one_node_rows()]
