"""Check that elastic training continues after one of two hosts fails.

Each emulated host has one process, on its own GPU or on a shared one.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid import HybridElasticStrategy
from recipes.gpu.fits import Small, loader, same_bits, short_fit
from recipes.gpu.runner import CheckRequest, Details
from recipes.gpu.worlds import run_world, use_other_class

# index of the host that fails, and the number of the backward pass in which it fails
LOST = 1
LOST_AT = 6


def lost_host(request: CheckRequest, *, is_other_class: bool = False) -> Details:
    """Check that the failure of one of two hosts does not change the final weights of an elastic run."""
    if is_other_class:
        use_other_class(request)
    # NCCL supports only one rank per GPU
    if request.on_cuda and request.num_gpus > 1:
        backend = "nccl"
    else:
        backend = "gloo"
    weights = []
    for may_die in ((), (LOST,)):
        run = partial(_be_host, backend, _free_addresses(), bool(may_die))
        answers = run_world(
            request, run, num_ranks=2, limit_s=0.45 * request.limit_s, may_die=may_die
        )
        assert bool(may_die) != bool(answers[LOST]), "A host must fail in the second run only."
        weights.append(torch.load(request.folder / "weights.pt", weights_only=True))
    same_bits(weights[1], weights[0], "After the failure of one of two hosts")
    message = f"Over {backend}, the other host continued and ended with the weights of the uninterrupted run."
    return {"message": message, "carrier": backend}


def _be_host(
    backend: str, meet: str, is_lost: bool, request: CheckRequest, rank: int, num_ranks: int
) -> Details:
    alone = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    # Each host is launched separately.
    alone |= {"MASTER_PORT": int(os.environ["MASTER_PORT"]) + rank}
    os.environ |= {name: str(value) for name, value in alone.items()}
    if backend == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(
            rank, os.environ.get("CUDA_VISIBLE_DEVICES")
        )
    count = [0]

    def lose(grad: Tensor) -> None:
        count[0] += 1
        if count[0] == LOST_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    if is_lost:
        min_hosts = 1
    else:
        min_hosts = 2
    strategy: Any = HybridElasticStrategy(
        max_hosts=2, min_hosts=min_hosts, meet=meet, process_group_backend=backend
    )
    module = Small(on_hidden=lose if is_lost and rank == LOST else None)
    weights = short_fit(request, module, "32-true", strategy=strategy, data=loader())
    if rank != LOST:
        torch.save(weights, request.folder / "weights.pt")
    return {"steps": module.trainer.global_step}


def visible_gpu(rank: int, visible: str | None) -> str:
    """Return the index or name of a rank's GPU, given the value of `CUDA_VISIBLE_DEVICES`.

    None means that all GPUs are visible.

    >>> visible_gpu(1, "4,5"), visible_gpu(1, "MIG-a, MIG-b"), visible_gpu(1, None)
    ('5', 'MIG-b', '1')
    """
    if not visible:
        return str(rank)
    return visible.split(",")[rank].strip()


def _free_addresses() -> str:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return ",".join(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
