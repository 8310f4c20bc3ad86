"""Speed checks of optimizer updates, ResNet-50 training and all-reduces."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_nccl import Nccl
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, numel
from recipes.gpu.fits import trainer_for
from recipes.gpu.runner import ROOT, CheckRequest, Details, NotHere
from recipes.gpu.training import FitClock, SameBatch, TrainedNet, fused_lars, fused_sgd
from recipes.gpu.updates import ARMS, FLOOR_BYTES, calls_in_a_row, copy_rate, time_one
from recipes.gpu.worlds import layout, run_world
from recipes.networks.resnet import ResNet

UPDATE_BOUND = 1.3  # maximum ratio to the time that a copy of the same bytes takes
PREDICTION_BOUND = 1.3  # maximum ratio to the planner's prediction of an all-reduce
NUM_SAMPLES = 5


# ---- updates ---------------------------------------------------------------------------------------------------------


def verdict(request: CheckRequest, *, is_fast: bool) -> str:
    """Return the status FAST or SLOW on a GPU, or PASS on a CPU, where speed does not matter."""
    if not request.on_cuda:
        return "PASS"
    if is_fast:
        return "FAST"
    return "SLOW"


def updates(request: CheckRequest) -> Details:
    """Time optimizer updates of this library and of torch, relative to copying the same number of bytes.

    On CUDA, many updates are timed between two events, queued behind a kernel that lets the host run ahead. LARS must
    take at most 1.3 times as long as copying the bytes that it reads and writes.
    """
    device = torch.device(request.device)
    if request.on_cuda:
        copied_bytes = 2**30
        gradient_set = "resnet50"
    else:
        copied_bytes = 2**24
        gradient_set = "linear_8mib"
    bytes_per_s = copy_rate(device, num_bytes=copied_bytes)
    shapes = GRADIENT_SETS[gradient_set]()

    table: list[Details] = []
    for arm in ("sgd_fused_fp32", "lars_fused", "adamw_fused_fp32", "lamb"):
        bytes_per_parameter = FLOOR_BYTES[arm]
        num_bytes = bytes_per_parameter * numel(shapes)
        device_s, host_s = seconds_of(ARMS[arm](shapes, device), device)
        table.append(
            {
                "arm": arm,
                "parameters": gradient_set,
                "bytes per parameter": bytes_per_parameter,
                "device ms": round(1e3 * device_s, 4),
                "host ms": round(1e3 * host_s, 4),
                "GB/s": round(num_bytes / device_s / 1e9, 1),
                "x bytes over bandwidth": round(device_s / (num_bytes / bytes_per_s), 2),
            }
        )

    ratios = {row["arm"]: row["x bytes over bandwidth"] for row in table}
    is_fast = ratios["lars_fused"] <= UPDATE_BOUND
    message = ", ".join(f"{arm} {ratio}" for arm, ratio in ratios.items())
    return {
        "status": verdict(request, is_fast=is_fast),
        "message": f"Copies reach {bytes_per_s / 1e9:.0f} GB/s. Update time relative to a copy: {message}.",
        "table": table,
        "copy_bytes_per_s": bytes_per_s,
    }


def seconds_of(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the median time that a call takes on the device, and that the host takes to enqueue it.

    On a GPU, a sample consists of several calls.
    """
    for _ in range(3):  # compiles and allocates
        work()
    num_in_a_row = calls_in_a_row(work)
    samples = [time_one(work, device, num_in_a_row=num_in_a_row) for _ in range(NUM_SAMPLES)]
    median_device_s = statistics.median(device_s for device_s, _ in samples)
    median_host_s = statistics.median(host_s for _, host_s in samples)
    return median_device_s, median_host_s


# ---- ResNet-50 -------------------------------------------------------------------------------------------------------


class ShardedNet(TrainedNet):
    """Network sharded with FSDP2 in bf16, with fp32 gradient reductions and fp32 normalization layers."""

    def configure_model(self) -> None:
        """Shard the network over all ranks with FSDP2, with normalization layers in fp32."""
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        self.net.to(memory_format=torch.contiguous_format)  # FSDP2 supports no other format
        norms = [module for module in self.net.modules() if isinstance(module, nn.BatchNorm2d)]
        fp32 = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(norms, mesh=mesh, mp_policy=fp32)  # type: ignore[arg-type]
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(self.net, mesh=mesh, mp_policy=bf16)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create SGD with `foreach=True`, because torch's fused SGD does not support DTensors."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, foreach=True)


def _size(request: CheckRequest) -> Details:
    if not request.on_cuda:
        return {"width": 0.125, "batch": 4, "pixels": 32, "num_warmup": 1, "num_steps": 2}
    has_large_memory = torch.cuda.get_device_properties(0).total_memory > 40 * 2**30
    if has_large_memory:
        batch = 256
    else:
        batch = 64
    return {"width": 1.0, "batch": batch, "pixels": 224, "num_warmup": 15, "num_steps": 40}


# Precision and strategy of each variant. On a CPU, Lightning uses bf16 for "16-mixed", and ignores DDP's hooks.
RESNET_ARMS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "ours, 16-true": ("16-true", lambda _: HybridAllReduceStrategy()),
    "ours, bf16-true": ("bf16-true", lambda _: HybridAllReduceStrategy()),
    "16-mixed": ("16-mixed", lambda _: "auto"),
    "bf16-mixed": ("bf16-mixed", lambda _: "auto"),
    "bf16-mixed, bf16_compress_hook": (
        "bf16-mixed",
        lambda _: DDPStrategy(ddp_comm_hook=bf16_compress_hook),
    ),
    "fully_shard, bf16 and fp32 sums": (
        "32-true",
        lambda num_ranks: ModelParallelStrategy(num_ranks, 1),
    ),
}


def images_per_s(arm: str, request: CheckRequest, rank: int, num_ranks: int) -> Details:
    """Train ResNet-50 with one variant, and return the throughput of all ranks in images per second."""
    size = _size(request)
    precision, make_strategy = RESNET_ARMS[arm]
    device = _device_of(request, rank)
    images = torch.randn(size["batch"], 3, size["pixels"], size["pixels"], device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (size["batch"],), device=device)

    clock = FitClock(begin=size["num_warmup"], end=size["num_warmup"] + size["num_steps"])
    trainer = trainer_for(
        request,
        precision,
        strategy=make_strategy(num_ranks),
        max_steps=clock.end,
        max_epochs=-1,
        deterministic=False,
        devices=num_ranks,
        use_distributed_sampler=False,
        benchmark=True,
        callbacks=[clock],
    )

    net = ResNet(depth=50, width=size["width"])
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
    if arm.startswith("fully_shard"):
        module_type: type[TrainedNet] = ShardedNet
    else:
        module_type = TrainedNet
    if arm.startswith("ours"):
        make_optimizer = fused_lars
    else:
        make_optimizer = fused_sgd
    module = module_type(net, make_optimizer)
    trainer.fit(module, SameBatch((images, labels), clock.end))
    return {"images_per_s": num_ranks * size["batch"] * size["num_steps"] / clock.seconds}


def _device_of(request: CheckRequest, rank: int) -> torch.device:
    if request.on_cuda:
        return torch.device("cuda", rank)
    return torch.device("cpu")


def resnet50(request: CheckRequest) -> Details:
    """Compare the ResNet-50 training throughput of this library with that of Lightning's strategies.

    All GPUs are used. This library uses LARS, and Lightning's strategies use fused SGD. Each round measures every
    variant in new processes, so that a failing variant only adds its error to the table.
    """
    if request.on_cuda:
        num_ranks = request.num_gpus
    else:
        num_ranks = 1
    samples, errors = _sample_arms(request, num_ranks)
    if not samples["ours, 16-true", num_ranks]:
        raise errors["ours, 16-true", num_ranks]

    rates = {}
    for (arm, _), arm_samples in samples.items():
        if arm_samples:
            rates[arm] = statistics.median(arm_samples)
    our_rate = statistics.median(samples["ours, 16-true", num_ranks])
    lightning_rates = {arm: rate for arm, rate in rates.items() if not arm.startswith("ours")}

    ratios = ", ".join(
        f"{our_rate / rate:.2f} times {arm} ({rate:.0f})" for arm, rate in lightning_rates.items()
    )
    message = f"ResNet-50 on {num_ranks} ranks trains {our_rate:.0f} images/s in 16-true with LARS: {ratios}"
    if not request.on_cuda:
        message = f"{message} (not a measurement, because the network is tiny)"
    return {
        "status": verdict(request, is_fast=our_rate > max(lightning_rates.values(), default=0.0)),
        "message": message,
        "table": _table_of_arms(request, samples, errors),
        # Last, because it creates a CUDA context, and the ranks are forked processes.
        "size": _size(request),
    }


_Samples = dict[tuple[str, int], list[float]]
_Errors = dict[tuple[str, int], AssertionError]


def _sample_arms(request: CheckRequest, num_ranks: int) -> tuple[_Samples, _Errors]:
    """Measure the training throughput of every variant on all ranks, and of one variant on a single rank.

    The variant on a single rank is `ours, 16-true`. Returns the samples of each variant in images per second, and the
    errors of variants that failed.
    """
    samples: _Samples = {(arm, num_ranks): [] for arm in RESNET_ARMS}
    samples.setdefault(("ours, 16-true", 1), [])
    errors: _Errors = {}
    if request.on_cuda:
        num_rounds = 2
    else:
        num_rounds = 1
    for _ in range(num_rounds):
        for (arm, arm_ranks), arm_samples in samples.items():
            run = partial(images_per_s, arm)
            try:
                answers = run_world(request, run, num_ranks=arm_ranks, limit_s=request.limit_s / 4)
            except AssertionError as error:
                errors[arm, arm_ranks] = error
            else:
                arm_samples.append(min(answer["images_per_s"] for answer in answers))
    return samples, errors


def _table_of_arms(request: CheckRequest, samples: _Samples, errors: _Errors) -> list[Details]:
    if request.on_cuda:
        devices = "GPUs"
    else:
        devices = "processes"
    table: list[Details] = []
    for (arm, num_ranks), arm_samples in samples.items():
        row: Details = {"arm": arm, devices: num_ranks}
        if arm_samples:
            row["images/s"] = round(statistics.median(arm_samples), 1)
        else:
            row["images/s"] = str(errors[arm, num_ranks])[:200]
        row["rounds"] = [round(sample, 1) for sample in arm_samples]
        table.append(row)
    return table


# ---- all-reduces -----------------------------------------------------------------------------------------------------


def sums(request: CheckRequest) -> Details:
    """Time fp16 all-reduces of 1, 25 and 100 MiB, and compare the times with the planner's predictions.

    Both the backend's all-reduce and this library's engine are timed. On a CPU the sizes are 1 and 4 MiB.
    """
    backend, num_ranks, _ = layout(request)
    if request.on_cuda and backend == "gloo":
        raise NotHere("This check needs two GPUs, or two MIG instances.")
    run = partial(_timed_sums, backend)
    answers = run_world(request, run, num_ranks=num_ranks, limit_s=0.9 * request.limit_s)

    if request.on_cuda:
        gpu_name = torch.cuda.get_device_name()
    else:
        gpu_name = ""
    cluster = cluster_of(gpu_name, num_ranks)
    table: list[Details] = []
    for mib in answers[0]:
        backend_s = max(answer[mib]["backend"] for answer in answers)
        engine_s = max(answer[mib]["engine"] for answer in answers)
        table.append(_row_of_sum(int(mib), backend_s, engine_s, num_ranks, cluster))

    times = ", ".join(
        f"{row['MiB']} MiB {row['engine ms']} ms ({row['backend ms']} by {backend})"
        for row in table
    )
    ratios = [row["x predicted"] for row in table if row["x predicted"]]
    if ratios:
        comparison = f"at most {max(ratios)} times the planner's prediction"
        status = verdict(request, is_fast=max(ratios) <= PREDICTION_BOUND)
    else:
        comparison = "no prediction for this machine"
        status = "PASS"
    return {
        "status": status,
        "message": f"All-reduces of {num_ranks} ranks: {times}; {comparison}.",
        "table": table,
    }


def _row_of_sum(
    mib: int, backend_s: float, engine_s: float, num_ranks: int, cluster: Cluster | None
) -> Details:
    num_bytes = mib * 2**20
    row: Details = {
        "MiB": mib,
        "backend ms": round(1e3 * backend_s, 3),
        "engine ms": round(1e3 * engine_s, 3),
        "bus GB/s": round(2 * (num_ranks - 1) / num_ranks * num_bytes / backend_s / 1e9, 2),
        "predicted ms": None,
        "x predicted": None,
    }
    if cluster is not None:
        predicted_s = cluster.alone_s("flat", num_bytes)
        row["predicted ms"] = round(1e3 * predicted_s, 3)
        row["x predicted"] = round(backend_s / predicted_s, 2)
    return row


def _timed_sums(backend: str, request: CheckRequest, rank: int, num_ranks: int) -> Details:
    """Time all-reduces of the backend and of the engine on one rank, and return the seconds for each size."""
    device = _device_of(request, rank)
    limit = timedelta(seconds=60)
    if request.on_cuda:
        torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=limit, device_id=device)
        sizes_mib = [1, 25, 100]
    else:
        dist.init_process_group(backend, timeout=limit)
        sizes_mib = [1, 4]
    topology = Topology.from_ranks_per_node(
        rank=rank, world_size=num_ranks, ranks_per_node=num_ranks
    )
    plan = CommPlan(algorithm="flat")
    engine = CommEngine(topology=topology, plan=plan, timeout=limit, device=device)

    def by_engine(flat: torch.Tensor) -> None:
        engine.submit(flat, bucket_index=0, is_last=True).wait()

    seconds: Details = {}
    for mib in sizes_mib:
        flat = torch.zeros(mib << 19, dtype=torch.float16, device=device)
        backend_s, _ = seconds_of(partial(dist.all_reduce, flat), device)
        engine_s, _ = seconds_of(partial(by_engine, flat), device)
        seconds[str(mib)] = {"backend": backend_s, "engine": engine_s}
    engine.close()
    return seconds


def cluster_of(gpu: str, num_ranks: int) -> Cluster | None:
    """Return the planner's description of one node with this GPU model, or None for an unknown model.

    >>> cluster_of("NVIDIA H200", 8).inside.bytes_per_s, cluster_of("NVIDIA T4", 2)
    (370800000000.0, None)
    """
    clusters = {"H200": "hgx_h200", "H100": "dgx_h100", "A100": "dgx_a100", "B200": "hgx_b200"}
    known_words = [word for word in gpu.replace("-", " ").split() if word in clusters]
    if not known_words or "PCI" in gpu.upper():  # PCIe cards are not connected by an NVSwitch
        return None
    file = ROOT / "conf" / "cluster" / f"{clusters[known_words[0]]}.yaml"
    links = yaml.safe_load(file.read_text())["links"]
    transport = {k: value for k, value in links["transport"].items() if not k.startswith("_")}
    return Cluster(
        num_nodes=1,
        ranks_per_node=num_ranks,
        inside=_link(links["inside"]),
        across=_link(links["across"]),
        transport=Nccl(**transport),
    )


def _link(description: Details) -> Link:
    return Link(latency_s=description["latency_s"], bytes_per_s=description["bytes_per_s"])
