"""All-reduce checks, and helpers that run a GPU check on several ranks with one process per rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.engine.stages import STAGES, run_stage
from lightning_hybrid.strategy.rendezvous import RendezvousError
from recipes.gpu.runner import CheckRequest, Details, NotHere, NotInTimeError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NUMELS = (1, 37, 10_007, 1 << 20)
RunOfRank = Callable[[CheckRequest, int, int], Details]


# ---- one rank --------------------------------------------------------------------------------------------------------


def one_rank(request: CheckRequest, *, is_other_class: bool = False) -> Details:
    """Check that each all-reduce algorithm leaves a tensor unchanged if there is only one rank.

    The stages of the algorithms use a process group of one rank.
    """
    if is_other_class:
        use_other_class(request)
    if request.on_cuda:
        backend = "nccl"
    else:
        backend = "gloo"
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    topology = Topology(rank=0, nodes=((0,),))
    on_cuda = request.on_cuda
    for algorithm, stages in STAGES.items():
        for dtype in DTYPES:
            for numel in NUMELS:
                flat = _integers(0, numel, dtype, torch.device(request.device))
                expected = flat.clone()
                job = Job(flat=flat, topology=topology, by_backend=on_cuda)
                # An engine with one rank runs no stage; here each stage uses the world's group.
                for stage in stages:
                    run_stage(stage, job, dist.group.WORLD)
                assert torch.equal(flat, expected), (
                    f"`{algorithm}` on one rank changed a tensor of {numel} elements of {dtype}."
                )
    dist.destroy_process_group()
    return {"message": f"{', '.join(STAGES)} over {backend} leave a tensor unchanged."}


def _integers(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of small integers that depend on the rank, whose sums are exact in every dtype."""
    return ((torch.arange(numel) * 7 + rank * 3) % 13 - 6).to(dtype).to(device)


# ---- several ranks ---------------------------------------------------------------------------------------------------


def layout(request: CheckRequest, *, is_other_class: bool = False) -> tuple[str, int, int]:
    """Choose a backend, a number of ranks and a number of ranks per emulated host for this machine.

    With several GPUs each rank has its own GPU over NCCL. With one GPU the ranks share it over Gloo, each as its own
    host. `is_other_class`: use the NCCL class that `"nccl"` does not select in this version of torch.

    Raises:
        NotHere: The other class was requested, and it does not exist or there is only one GPU.
    """
    if is_other_class:
        use_other_class(request)
    if not request.on_cuda:
        return "gloo", 4, 4
    if request.num_gpus < 2:
        if is_other_class:
            raise NotHere("This check needs two GPUs, or two MIG instances.")
        return "gloo", 4, 1
    # Adasum needs a power of two of nodes.
    num_ranks = min(8, 1 << request.num_gpus.bit_length() - 1)
    return "nccl", num_ranks, num_ranks


def use_other_class(request: CheckRequest) -> None:
    """Make this process and its ranks use the NCCL process-group class that is not torch's default.

    Raises:
        NotHere: There is no GPU, or this version of torch has only one class.
    """
    if not request.on_cuda or not hasattr(dist, "ProcessGroupNCCL2"):
        raise NotHere(
            "This version of torch has only one NCCL process-group class."
            if request.on_cuda
            else "NCCL needs a GPU."
        )
    # In torch 2.14 the second class must be requested, and from 2.15 on the first one.
    is_default = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    os.environ["TORCH_DIST_USE_NCCL2"] = "0" if is_default else "1"


class KnownSums(pl.Callback):
    """Callback that checks the results of all-reduces of known values when training starts."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All-reduce small integers with a separate engine, and raise if a result is wrong."""
        rank = trainer.global_rank
        world_size = trainer.world_size
        device = trainer.strategy.root_device
        topology = Topology.from_ranks_per_node(
            rank=rank, world_size=world_size, ranks_per_node=world_size // 2
        )
        plan = CommPlan(algorithm=self.algorithm)
        engine = CommEngine(
            topology=topology, plan=plan, timeout=timedelta(seconds=30), device=device
        )
        cases = [(dtype, numel) for dtype in DTYPES for numel in NUMELS]
        mine = [_integers(rank, numel, dtype, device) for dtype, numel in cases]
        last = len(cases) - 1
        sums = [
            engine.submit(flat, bucket_index=i, is_last=i == last) for i, flat in enumerate(mine)
        ]
        for (dtype, numel), future in zip(cases, sums, strict=True):
            addends = [
                _integers(other_rank, numel, torch.float32, device)
                for other_rank in range(world_size)
            ]
            expected = torch.stack(addends).sum(0).to(dtype)
            assert torch.equal(future.wait(), expected), (
                f"`{self.algorithm}` computed a wrong sum of {numel} elements of {dtype}."
            )
        engine.close()


# ---- processes -------------------------------------------------------------------------------------------------------


def run_world(
    request: CheckRequest,
    run: RunOfRank,
    *,
    num_ranks: int,
    limit_s: float,
    per_host: int | None = None,
    may_die: tuple[int, ...] = (),
) -> list[Details]:
    """Call `run(request, rank, num_ranks)` in a new process for each rank, and return all results by rank.

    `per_host`: number of ranks per emulated host, each with its own device. Hosts share the devices. None: all ranks
    are on one host. `may_die`: ranks whose failure is ignored.

    Raises:
        AssertionError: A rank raised an error, or its process died.
        NotInTimeError: A rank was not finished within `limit_s`, or timed out waiting for other ranks.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # everything is imported, and this process has no CUDA context
    context = multiprocessing.get_context("fork")
    paths = [request.folder / f"rank{rank}.json" for rank in range(num_ranks)]
    for path in paths:
        path.unlink(missing_ok=True)
    processes = [
        context.Process(
            target=_be_rank,
            args=(run, request, rank, num_ranks, per_host or num_ranks, port, os.getpgrp()),
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        end_s = time.monotonic() + limit_s
        for rank, process in enumerate(processes):
            if rank not in may_die:  # a rank in `may_die` may be stopped
                process.join(max(0.0, end_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    answers: list[Details] = [
        json.loads(path.read_text()) if path.exists() else {} for path in paths
    ]
    for rank, (answer, code) in enumerate(zip(answers, codes, strict=True)):
        if rank in may_die:
            continue
        if "failed" in answer:
            message = f"Rank {rank} of {num_ranks} failed: {answer['failed']}"
            if answer.get("is_of_time"):
                raise NotInTimeError(message)
            raise AssertionError(message)
        if not answer and code is None:
            raise NotInTimeError(
                f"Rank {rank} of {num_ranks} did not finish within {limit_s:.0f} s."
            )
        if not answer:
            raise AssertionError(f"Rank {rank} of {num_ranks} exited with code {code}.")
    return answers


def is_of_time(error: BaseException) -> bool:
    """Return whether an error is a timeout, according to its type or message.

    >>> is_of_time(RuntimeError("wait timeout after 15000ms")), is_of_time(RuntimeError("the sum is wrong"))
    (True, False)
    """
    text = str(error).lower()
    return (
        isinstance(error, TimeoutError | RendezvousError)
        or "timeout" in text
        or "timed out" in text
    )


def _be_rank(
    run: RunOfRank,
    request: CheckRequest,
    rank: int,
    num_ranks: int,
    per_host: int,
    port: int,
    group: int,
) -> None:
    """Run one rank of a check in this child process, and write its result to a file.

    The environment variables are set as torchrun sets them. The process joins the process group of its check. There is
    one emulated host, or several with `per_host` ranks each.
    """
    os.setpgid(0, group)
    with (request.folder / f"rank{rank}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
    }
    variables |= {"GROUP_RANK": rank // per_host, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="gpu_check")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        answer = run(request, rank, num_ranks)
    except BaseException as error:
        answer = {
            "failed": f"{type(error).__name__}: {error}"[:1000],
            "is_of_time": is_of_time(error),
        }
    (request.folder / f"rank{rank}.json").write_text(json.dumps(answer))
    os._exit(0)
