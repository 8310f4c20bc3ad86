"""Checks of distributed features, which compare small training runs on GPUs and on the CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightning_hybrid import (
    Adasum,
    Comm,
    HybridAllReduceStrategy,
    HybridPipelineStrategy,
    LocalSteps,
    Mean,
)
from lightning_hybrid.flavours.fabric import HybridAllReduceStrategy as FabricStrategy
from lightning_hybrid.precision.sharded import HostShards
from recipes.gpu.fits import Small, apart, loader, trainer_for
from recipes.gpu.runner import CheckRequest, Details, NotHere
from recipes.gpu.worlds import KnownSums, layout, run_world

NUM_STAGES = 2
LOST_AT = 6
LOST_RANK = 1
# Seconds after the rank has ended. A stopped rank must be named within 30 s after the timeout.
NAMED_WITHIN_S = 60.0
# Stopping a rank, as a debugger does, causes no error in NCCL, but the other ranks must still name the stopped one.
LOSSES: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": lambda: int("raised on purpose"),
}


class Plain(Small):
    """Small network for pipeline checks. Its training step does not update buffers of the LightningModule."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch."""
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])


class Sliced(Plain):
    """Small network with two layers that are tensor-parallel within a node."""

    node_slices = (("net.9", "net.11"),)


class Sharded(Plain):
    """Small network that is sharded with FSDP2."""

    offloads = False

    def configure_model(self) -> None:
        """Shard the network over all ranks with FSDP2."""
        self.net.to(memory_format=torch.contiguous_format)  # FSDP2 supports no other format
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        if self.offloads:
            policy: OffloadPolicy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        else:
            policy = OffloadPolicy()
        fully_shard(self.net, mesh=mesh, offload_policy=policy)

    def on_train_end(self) -> None:
        """Gather the full weights while they are still on a device that the process group supports."""
        self.whole = {name: weight.full_tensor() for name, weight in self.named_parameters()}  # type: ignore[attr-defined]


class Offloaded(Sharded):
    """Small network sharded with FSDP2 and CPU offloading of shards, gradients and optimizer state."""

    offloads = True


class Offloading(HostShards, ModelParallelStrategy):
    """FSDP2 strategy with CPU offloading, used to train `Offloaded`."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Settings of a training run that checks one feature. The defaults are 16-true, LARS and two emulated nodes.

    `bound`: maximum relative distance of any parameter between GPUs and CPU. It is several times the distance that
    results from other CPU kernels, or from images that differ by an eighth of a rounding error. `by_gloo`: whether Gloo
    supports all collectives of the run if ranks share one GPU. NCCL does not support ranks that share a GPU, and Gloo
    cannot send GPU tensors from one rank to another.
    """

    promise: str
    options: Mapping[str, Any] = field(default_factory=dict)
    comm: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "16-true"
    optimizer: str = "lars"
    num_nodes: int = 2
    module: type[Small] = Small
    strategy: type[Any] = HybridAllReduceStrategy
    bound: float = 2e-2
    by_gloo: bool = False


_SUMS = partial(Feature, promise="exact results of the four all-reduces", by_gloo=True)
_CODEC = partial(
    Feature, promise="8-bit and 4-bit gradients between nodes, with error feedback", bound=0.05
)
_STAGES = partial(Feature, promise="pipelines", strategy=HybridPipelineStrategy, module=Plain)
_STAGED = {"num_stages": NUM_STAGES, "num_microbatches": 4}
FEATURES: dict[str, Feature] = {
    "flat": _SUMS(comm={"algorithm": "flat"}),
    "parallel_flat": _SUMS(comm={"algorithm": "parallel_flat"}),
    "hierarchical": _SUMS(comm={"algorithm": "hierarchical"}),
    "two_level": _SUMS(comm={"algorithm": "two_level"}),
    # 5 times 3.0e-2, the distance for images that differ by a relative 2**-11, an eighth of a rounding error.
    "bf16": Feature(
        promise="bf16-true on several ranks", precision="bf16-true", bound=0.15, by_gloo=True
    ),
    "lamb": Feature(promise="LAMB on several ranks", optimizer="lamb", by_gloo=True),
    "accumulation": Feature(
        promise="gradient accumulation", settings={"accumulate_grad_batches": 2}, by_gloo=True
    ),
    "clipping": Feature(
        promise="gradient clipping", settings={"gradient_clip_val": 0.5}, by_gloo=True
    ),
    "fp16_wire": Feature(
        promise="fp16 gradients on the wire",
        comm={"dtype": "float16"},
        precision="32-true",
        by_gloo=True,
    ),
    "int8": _CODEC(options={"between_nodes": Mean(dtype="int8")}),
    "int8_feedback": _CODEC(options={"between_nodes": Mean(dtype="int8", error_feedback=True)}),
    "int4": _CODEC(options={"between_nodes": Mean(dtype="int4")}),
    "int4_feedback": _CODEC(options={"between_nodes": Mean(dtype="int4", error_feedback=True)}),
    # 3.6 times 2.8e-2, the distance for other kernels: the same training on a CPU without oneDNN.
    "adasum": Feature(
        promise="Adasum", options={"between_nodes": Adasum()}, optimizer="sgd", bound=0.1
    ),
    "local_steps": Feature(
        promise="local steps", options={"between_nodes": LocalSteps(every=2)}, by_gloo=True
    ),
    "shard_update": Feature(
        promise="updates sharded within a node", options={"shard_update": "node"}, num_nodes=1
    ),
    "shard_update_world": Feature(
        promise="updates sharded over all ranks", options={"shard_update": "world"}
    ),
    "node_slices": Feature(
        promise="layers divided among the ranks of a node", module=Sliced, num_nodes=1
    ),
    "orthogonal": Feature(promise="orthogonal updates", optimizer="orthogonal"),
    "pipeline_gpipe": _STAGES(options={**_STAGED, "schedule": "gpipe"}),
    "pipeline_1f1b": _STAGES(options={**_STAGED, "schedule": "1f1b"}),
    "pipeline_interleaved": _STAGES(options={**_STAGED, "schedule": "interleaved"}),
    "fsdp2": Feature(
        promise="FSDP2", strategy=ModelParallelStrategy, module=Sharded, precision="32-true"
    ),
    "fsdp2_offload": Feature(
        promise="FSDP2 with CPU offloading",
        strategy=Offloading,
        module=Offloaded,
        precision="32-true",
    ),
    "fabric": Feature(promise="Fabric", strategy=FabricStrategy, by_gloo=True),
}


def fits_as_on_cpu(name: str, request: CheckRequest, *, is_other_class: bool = False) -> Details:
    """Check that training with a feature gives the same weights on all ranks, and similar weights on the CPU.

    `is_other_class`: use the NCCL class that `"nccl"` does not select in this version of torch.
    """
    feature = FEATURES[name]
    backend, num_ranks, per_host = layout(request, is_other_class=is_other_class)
    if request.on_cuda and backend == "gloo" and not feature.by_gloo:
        raise NotHere(
            "This check needs two GPUs or two MIG instances, because NCCL supports only one rank on each, and Gloo "
            "does not support all of the operations on GPUs."
        )
    on_cpu = replace(request, device="cpu")
    worlds = [(request, backend, per_host)] + (
        [(on_cpu, "gloo", num_ranks)] if request.on_cuda else []
    )
    weights = []
    for where, carrier, of_host in worlds:
        run = partial(_trained, feature, carrier, of_host)
        answers = run_world(
            where, run, num_ranks=num_ranks, limit_s=0.45 * request.limit_s, per_host=of_host
        )
        assert len({answer["bits"] for answer in answers}) == 1, (
            f"The ranks ended with different weights over {carrier}."
        )
        weights.append(torch.load(request.folder / f"{where.device}.pt", weights_only=True))
    assert all(weight.isfinite().all() for weight in weights[0].values()), (
        "The final weights are not finite."
    )
    message = f"The weights of {num_ranks} ranks over {backend} are bit-identical"
    if not request.on_cuda:
        return {"message": message, "carrier": backend}
    distance = max(apart(weights[0][key], weights[1][key]) for key in weights[1])
    assert distance < feature.bound, (
        f"The weights differ from those of the CPU by {distance:.2g}, more than the bound {feature.bound}."
    )
    message = f"{message}, and differ from those of the CPU by {distance:.1e} of their norm"
    return {"message": message, "apart": distance, "carrier": backend}


def _timeout(request: CheckRequest) -> timedelta:
    # The first steps on a GPU compile kernels.
    return timedelta(seconds=60 if request.on_cuda else 20)


def _trained(
    feature: Feature,
    backend: str,
    per_host: int,
    request: CheckRequest,
    rank: int,
    num_ranks: int,
    on_hidden: Any = None,
) -> Details:
    """Train with a feature on one rank, and return a fingerprint of the final weights.

    Each rank trains on different images, but all stages of a pipeline read the same images.
    """
    options = {**feature.options, "process_group_backend": backend, "timeout": _timeout(request)}
    if issubclass(feature.strategy, ModelParallelStrategy):
        options |= {"data_parallel_size": num_ranks, "tensor_parallel_size": 1}
    else:
        options["ranks_per_node"] = num_ranks // feature.num_nodes
        options["loss_scale"] = 2.0**10 if feature.precision == "16-true" else None
        # several buckets, which may complete out of order
        options["comm"] = Comm(bucket_bytes=2048, **feature.comm)
    strategy = feature.strategy(**options)
    module = feature.module(feature.optimizer, on_hidden=on_hidden)
    batches = loader(
        seed=rank // NUM_STAGES if feature.strategy is HybridPipelineStrategy else rank
    )
    of_ranks = {"devices": per_host, "num_nodes": num_ranks // per_host}
    if isinstance(strategy, Strategy):
        if "algorithm" in feature.comm:
            callbacks = [KnownSums(feature.comm["algorithm"])]
        else:
            callbacks = []
        fit: dict[str, Any] = {
            "strategy": strategy,
            "max_epochs": 1,
            "callbacks": callbacks,
            **feature.settings,
        }
        trainer = trainer_for(
            request, feature.precision, use_distributed_sampler=False, **of_ranks, **fit
        )
        trainer.fit(module, batches)
    else:
        _loop(request, feature, module, batches, strategy=strategy, **of_ranks)
    parameters = getattr(module, "whole", None) or dict(module.named_parameters())
    weights = {name: weight.detach().cpu().float() for name, weight in parameters.items()}
    if rank == 0:
        torch.save(weights, request.folder / f"{request.device}.pt")
    parts = (
        weight.double().flatten() @ torch.arange(1.0, weight.numel() + 1).double()
        for weight in weights.values()
    )
    return {"bits": " ".join(float(part).hex() for part in parts)}


def _loop(
    request: CheckRequest, feature: Feature, module: Small, batches: Any, **settings: Any
) -> None:
    if request.on_cuda:
        accelerator = "gpu"
    else:
        accelerator = "cpu"
    fabric = lightning.Fabric(accelerator=accelerator, precision=feature.precision, **settings)  # type: ignore[arg-type]
    fabric.launch()
    model, optimizer = fabric.setup(module.net, module.configure_optimizers())
    for images, labels in fabric.setup_dataloaders(batches, use_distributed_sampler=False):
        loss = F.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    fabric.strategy.teardown()


# ---- rank failures ---------------------------------------------------------------------------------------------------


def loss_limit_s(how: str) -> float:
    """Return the time limit in seconds for a check that kills or stops a rank.

    Over Gloo, the other ranks detect a stopped rank only after the timeout of 60 s.
    """
    if how == "stopped":
        return 240
    return 150


def lost_rank(how: str, request: CheckRequest, *, is_other_class: bool = False) -> Details:
    """Check that all other ranks raise an error that names the rank that failed during backward.

    `how` is one of `LOSSES`: the rank is killed, is stopped or raises an error.
    """
    backend, num_ranks, per_host = layout(request, is_other_class=is_other_class)
    lost = request.folder / "lost_s"
    limit_s = 0.9 * request.limit_s
    run = partial(_loses_a_rank, how, lost, backend, per_host)
    answers = run_world(
        request, run, num_ranks=num_ranks, limit_s=limit_s, per_host=per_host, may_die=(LOST_RANK,)
    )
    answers.pop(LOST_RANK)
    for answer in answers:
        assert f"rank {LOST_RANK}" in answer["error"], (
            f"A rank did not name the failed rank {LOST_RANK}, but raised: {answer['error'][:300]}"
        )
    slowest_s = max(answer["noticed_s"] for answer in answers) - float(lost.read_text())
    if how == "stopped":
        within_s = 30 + _timeout(request).total_seconds()
    else:
        within_s = NAMED_WITHIN_S
    assert slowest_s < within_s, (
        f"A rank needed {slowest_s:.1f} s to notice the failure, more than {within_s} s."
    )
    message = f"Over {backend}, all other ranks named the failed rank within {slowest_s:.1f} s."
    return {"message": message, "carrier": backend}


def _loses_a_rank(
    how: str,
    lost: Path,
    backend: str,
    per_host: int,
    request: CheckRequest,
    rank: int,
    num_ranks: int,
) -> Details:
    count = [0]

    def lose(grad: Tensor) -> None:
        count[0] += 1
        if count[0] == LOST_AT:
            lost.write_text(str(time.monotonic()))
            LOSSES[how]()

    error = "No error was raised."
    try:
        if rank == LOST_RANK:
            on_hidden = lose
        else:
            on_hidden = None
        _trained(
            FEATURES["hierarchical"],
            backend,
            per_host,
            request,
            rank,
            num_ranks,
            on_hidden=on_hidden,
        )
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"noticed_s": time.monotonic(), "error": error}
