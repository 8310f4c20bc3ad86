"""Speed: updates against the memory's bandwidth, training against Lightning's own, sums against the planner."""

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
from recipes.gpu.runner import ROOT, Details, Given, NotHere
from recipes.gpu.training import FitClock, SameBatch, TrainedNet, fused_lars, fused_sgd
from recipes.gpu.updates import ARMS, FLOOR_BYTES, calls_in_a_row, copy_rate, time_one
from recipes.gpu.worlds import layout, run_world
from recipes.networks.resnet import ResNet

UPDATE_BOUND = 1.3  # times the bytes over the bandwidth of a copy
PREDICTION_BOUND = 1.3  # times the planner's seconds of a sum
NUM_SAMPLES = 5


# ---- updates ---------------------------------------------------------------------------------------------------------


def verdict(given: Given, *, is_fast: bool) -> str:
    """Return FAST or SLOW for a GPU; on a CPU, where nothing is measured, PASS."""
    return "PASS" if not given.on_cuda else "FAST" if is_fast else "SLOW"


def updates(given: Given) -> Details:
    """Time updates and torch's on the device; compare with their bytes at the rate of a copy.

    On CUDA: many updates between two events, behind a kernel that lets the host run ahead. LARS must take no
    more than 1.3 times their bytes.
    """
    device = torch.device(given.device)
    rate = copy_rate(device, num_bytes=2**30 if given.on_cuda else 2**24)
    case = "resnet50" if given.on_cuda else "linear_8mib"
    shapes = GRADIENT_SETS[case]()
    table = list[Details]()
    for arm in ("sgd_fused_fp32", "lars_fused", "adamw_fused_fp32", "lamb"):
        num_bytes = FLOOR_BYTES[arm]
        device_s, host_s = seconds_of(ARMS[arm](shapes, device), device)
        floor_s = num_bytes * numel(shapes) / rate
        row: Details = {"arm": arm, "parameters": case, "bytes per parameter": num_bytes}
        row |= {"device ms": round(1e3 * device_s, 4), "host ms": round(1e3 * host_s, 4)}
        table.append(row | {"GB/s": round(num_bytes * numel(shapes) / device_s / 1e9, 1)})
        table[-1]["x bytes over bandwidth"] = round(device_s / floor_s, 2)
    ratios = {row["arm"]: row["x bytes over bandwidth"] for row in table}
    is_fast = ratios["lars_fused"] <= UPDATE_BOUND
    message = ", ".join(f"{arm} {ratio}" for arm, ratio in ratios.items())
    return {
        "status": verdict(given, is_fast=is_fast),
        "message": f"copy {rate / 1e9:.0f} GB/s; times its bytes: {message}",
        "table": table,
        "copy_bytes_per_s": rate,
    }


def seconds_of(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Time the device, and the host that enqueues: medians over samples, each of several calls on a GPU."""
    for _ in range(3):  # compiles, and touches memory
        work()
    num_in_a_row = calls_in_a_row(work)
    samples = [time_one(work, device, num_in_a_row=num_in_a_row) for _ in range(NUM_SAMPLES)]
    return statistics.median(one for one, _ in samples), statistics.median(
        host_s for _, host_s in samples
    )


# ---- ResNet-50 -------------------------------------------------------------------------------------------------------


class ShardedNet(TrainedNet):
    """FSDP2: bf16 with fp32 sums; normalisation stays fp32, as under autocast."""

    def configure_model(self) -> None:
        """Shard the network over all ranks."""
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        self.net.to(memory_format=torch.contiguous_format)  # FSDP2 takes no other
        norms = [module for module in self.net.modules() if isinstance(module, nn.BatchNorm2d)]
        fully_shard(norms, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))  # type: ignore[arg-type]
        fully_shard(
            self.net, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make SGD by lists: torch's fused one takes no DTensors."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, foreach=True)


def _size(given: Given) -> Details:
    if not given.on_cuda:
        return {"width": 0.125, "batch": 4, "pixels": 32, "num_warmup": 1, "num_steps": 2}
    batch = 256 if torch.cuda.get_device_properties(0).total_memory > 40 * 2**30 else 64
    return {"width": 1.0, "batch": batch, "pixels": 224, "num_warmup": 15, "num_steps": 40}


# Precision and strategy of each arm. By the name of "16-mixed" Lightning takes bf16 on a CPU, and drops DDP's hooks.
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


def images_per_s(arm: str, given: Given, rank: int, num_ranks: int) -> Details:
    """Measure the images per second of all ranks with an arm of `RESNET_ARMS`."""
    size = _size(given)
    (precision, strategy) = RESNET_ARMS[arm]
    device = torch.device("cuda", rank) if given.on_cuda else torch.device("cpu")
    images = torch.randn(size["batch"], 3, size["pixels"], size["pixels"], device=device)
    batch = (
        images.contiguous(memory_format=torch.channels_last),
        torch.randint(1000, (size["batch"],), device=device),
    )
    clock = FitClock(begin=size["num_warmup"], end=size["num_warmup"] + size["num_steps"])
    settings = {
        "strategy": strategy(num_ranks),
        "max_steps": clock.end,
        "max_epochs": -1,
        "deterministic": False,
    }
    settings |= {
        "devices": num_ranks,
        "use_distributed_sampler": False,
        "benchmark": True,
        "callbacks": [clock],
    }
    net = ResNet(depth=50, width=size["width"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
    kind = ShardedNet if arm.startswith("fully_shard") else TrainedNet
    module = kind(net, fused_lars if arm.startswith("ours") else fused_sgd)
    trainer_for(given, precision, **settings).fit(module, SameBatch(batch, clock.end))
    return {"images_per_s": num_ranks * size["batch"] * size["num_steps"] / clock.seconds}


def resnet50(given: Given) -> Details:
    """Measure images per second of ResNet-50 in turns: ours with LARS, Lightning's own with fused SGD, on all GPUs.

    A rank is a process of its own for each arm and round: an arm that fails is a row with its error.
    """
    num_gpus = given.num_gpus if given.on_cuda else 1
    num_rounds = 2 if given.on_cuda else 1
    worlds = {(arm, num_gpus): list[float]() for arm in RESNET_ARMS} | {
        ("ours, 16-true", 1): list[float]()
    }
    errors: dict[tuple[str, int], AssertionError] = {}
    for (arm, num_ranks), samples in [*worlds.items()] * num_rounds:
        try:
            run = partial(images_per_s, arm)
            answers = run_world(given, run, num_ranks=num_ranks, limit_s=given.limit_s / 4)
            samples.append(min(answer["images_per_s"] for answer in answers))
        except AssertionError as error:
            errors[arm, num_ranks] = error
    table: list[Details] = []
    for (arm, num_ranks), samples in worlds.items():
        row: Details = {"arm": arm, "GPUs" if given.on_cuda else "processes": num_ranks}
        row["images/s"] = (
            round(statistics.median(samples), 1) if samples else str(errors[arm, num_ranks])[:200]
        )
        table.append(row | {"rounds": [round(sample, 1) for sample in samples]})
    if not worlds["ours, 16-true", num_gpus]:
        raise errors["ours, 16-true", num_gpus]
    ours = statistics.median(worlds["ours, 16-true", num_gpus])
    rates = {arm: statistics.median(found) for (arm, _), found in worlds.items() if found}
    theirs = {arm: rate for arm, rate in rates.items() if not arm.startswith("ours")}
    message = ", ".join(
        f"{ours / rate:.2f} times {arm} ({rate:.0f})" for arm, rate in theirs.items()
    )
    message = f"ResNet-50, {num_gpus} ranks: {ours:.0f} images/s in 16-true with LARS: {message}"
    return {
        "status": verdict(given, is_fast=ours > max(theirs.values(), default=0.0)),
        "message": message if given.on_cuda else f"{message} (a tiny network: no measurement)",
        "table": table,
        "size": _size(given),  # not before: ranks are forks, and it makes a context of CUDA's
    }


# ---- sums ------------------------------------------------------------------------------------------------------------


def sums(given: Given) -> Details:
    """Time sums of 1, 25 and 100 MiB of fp16 by the backend and by our engine; compare with the planner's."""
    backend, num_ranks, _ = layout(given)
    if given.on_cuda and backend == "gloo":
        raise NotHere("needs two GPUs, or two MIG instances")
    of_ranks = run_world(
        given, partial(_timed_sums, backend), num_ranks=num_ranks, limit_s=0.9 * given.limit_s
    )
    cluster = cluster_of(torch.cuda.get_device_name() if given.on_cuda else "", num_ranks)
    table: list[Details] = []
    for key in of_ranks[0]:
        num_bytes = int(key) * 2**20
        (sum_s, engine_s) = (max(each[key][way] for each in of_ranks) for way in (0, 1))
        row: Details = {
            "MiB": int(key),
            "backend ms": round(1e3 * sum_s, 3),
            "engine ms": round(1e3 * engine_s, 3),
        }
        row["bus GB/s"] = round(2 * (num_ranks - 1) / num_ranks * num_bytes / sum_s / 1e9, 2)
        predicted_s = None if cluster is None else cluster.alone_s("flat", num_bytes)
        row["predicted ms"] = None if predicted_s is None else round(1e3 * predicted_s, 3)
        table.append(
            row | {"x predicted": None if predicted_s is None else round(sum_s / predicted_s, 2)}
        )
    slowest = max((row["x predicted"] for row in table if row["x predicted"]), default=None)
    said = ", ".join(
        f"{row['MiB']} MiB {row['engine ms']} ms ({row['backend ms']} by {backend})"
        for row in table
    )
    words = (
        "no prediction for this machine"
        if slowest is None
        else f"at most {slowest} times the planner's"
    )
    status = "PASS" if slowest is None else verdict(given, is_fast=slowest <= PREDICTION_BOUND)
    return {
        "status": status,
        "message": f"sums of {num_ranks} ranks: {said}; {words}",
        "table": table,
    }


def _timed_sums(backend: str, given: Given, rank: int, num_ranks: int) -> Details:
    device = torch.device("cuda", rank) if given.on_cuda else torch.device("cpu")
    limit = timedelta(seconds=60)
    if given.on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=limit, device_id=device if given.on_cuda else None)
    topology = Topology.from_ranks_per_node(
        rank=rank, world_size=num_ranks, ranks_per_node=num_ranks
    )
    engine = CommEngine(
        topology=topology, plan=CommPlan(algorithm="flat"), timeout=limit, device=device
    )
    found = {}
    for mib in (1, 25, 100) if given.on_cuda else (1, 4):
        flat = torch.zeros(mib << 19, dtype=torch.float16, device=device)
        ways = (
            lambda: dist.all_reduce(flat),  # noqa: B023
            lambda: engine.submit(flat, bucket_index=0, is_last=True).wait(),  # noqa: B023
        )
        found[str(mib)] = [seconds_of(way, device)[0] for way in ways]
    engine.close()
    return found


def cluster_of(gpu: str, num_ranks: int) -> Cluster | None:
    """Return the description in conf/cluster of one node with GPUs of this name; None where there is none.

    >>> cluster_of("NVIDIA H200", 8).inside.bytes_per_s, cluster_of("NVIDIA T4", 2)
    (370800000000.0, None)
    """
    names = {"H200": "hgx_h200", "H100": "dgx_h100", "A100": "dgx_a100", "B200": "hgx_b200"}
    name = next((names[word] for word in gpu.replace("-", " ").split() if word in names), None)
    if name is None or "PCI" in gpu.upper():  # which has no switch between all GPUs
        return None
    links = yaml.safe_load((ROOT / "conf" / "cluster" / f"{name}.yaml").read_text())["links"]
    values = {key: value for key, value in links["transport"].items() if not key.startswith("_")}
    ends = [
        Link(latency_s=links[at]["latency_s"], bytes_per_s=links[at]["bytes_per_s"])
        for at in ("inside", "across")
    ]
    transport = Nccl(**values)
    return Cluster(
        num_nodes=1, ranks_per_node=num_ranks, inside=ends[0], across=ends[1], transport=transport
    )
