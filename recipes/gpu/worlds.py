"""Checks with ranks: all algorithms on one rank, four ranks on one device; with more GPUs, NCCL and a dead rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid import Comm, HybridAllReduceStrategy
from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.engine.stages import STAGES, run_stage
from recipes.gpu.fits import Small, loader, trainer_for
from recipes.gpu.runner import Details, Given, NotHere

SUMS = tuple(STAGES)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NUMELS = (1, 37, 10_007, 1 << 20)
KILLED_AT, KILLED_RANK = 6, 1
NAMED_WITHIN_S = 60.0


# ---- one rank --------------------------------------------------------------------------------------------------------


def one_rank(given: Given) -> Details:
    """Run all four algorithms through the backend's communicators of one rank: the sum is the tensor, bit for bit."""
    backend = "nccl" if given.on_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    topology, on_cuda = Topology(rank=0, nodes=((0,),)), given.on_cuda
    for algorithm, stages in STAGES.items():
        for dtype in DTYPES:
            for numel in NUMELS:
                flat = _integers(0, numel, dtype, torch.device(given.device))
                expected = flat.clone()
                job = Job(flat=flat, topology=topology, by_backend=on_cuda)
                for stage in stages:  # an engine of one rank runs none: here each has the world's group
                    run_stage(stage, job, dist.group.WORLD)
                assert torch.equal(flat, expected), f"{algorithm} of {numel} {dtype} on one rank changed the tensor"
    dist.destroy_process_group()
    return {"message": f"{', '.join(SUMS)} over {backend}"}


def _integers(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return small integers, whose sums are exact in every dtype; another row for each rank."""
    return ((torch.arange(numel) * 7 + rank * 3) % 13 - 6).to(dtype).to(device)


# ---- several ranks ---------------------------------------------------------------------------------------------------


def four_ranks(given: Given) -> Details:
    """Run four ranks of one device over Gloo, as two nodes of two: sums and whole fits of every algorithm."""
    return _all_algorithms(given, backend="gloo", num_ranks=4, devices_per_host=1)


def nccl(given: Given) -> Details:
    """Run the same on a GPU per rank, over NCCL, as two nodes of one host."""
    num_ranks = _num_gpus_for_ranks(given)
    return _all_algorithms(given, backend="nccl", num_ranks=num_ranks, devices_per_host=num_ranks)


def nccl_of_the_other_class(given: Given) -> Details:
    """Run it by the class of NCCL that `"nccl"` does not name in this torch."""
    _use_other_class(given)
    return nccl(given)


def _use_other_class(given: Given) -> None:
    _num_gpus_for_ranks(given)
    if not hasattr(dist, "ProcessGroupNCCL2"):
        raise NotHere("this torch has one class of NCCL")
    # torch 2.14 has the second where it is asked for, 2.15 has the first so.
    is_default = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    os.environ["TORCH_DIST_USE_NCCL2"] = "0" if is_default else "1"


def _num_gpus_for_ranks(given: Given) -> int:
    num_gpus = min(8, torch.cuda.device_count() // 2 * 2) if given.on_cuda else 0
    if num_gpus < 2:
        raise NotHere(f"needs two GPUs, and there {'is one' if given.on_cuda else 'are none'}")
    return num_gpus


def _all_algorithms(given: Given, *, backend: str, num_ranks: int, devices_per_host: int) -> Details:
    setup = {"backend": backend, "devices_per_host": devices_per_host}
    run, limit_s = partial(_sums_and_fits, setup), 0.9 * given.limit_s
    answers = run_world(given, run, num_ranks=num_ranks, limit_s=limit_s, per_host=devices_per_host)
    table = []
    for algorithm in SUMS:
        of_ranks = [answer[algorithm] for answer in answers]
        error = next((each["error"] for each in of_ranks if each["error"]), "")
        if not error and len({each["weights"] for each in of_ranks}) > 1:
            error = "weights must have the same bits on all ranks, and have not"
        seconds = max(each["seconds"] for each in of_ranks)
        table.append({"algorithm": algorithm, "ranks": num_ranks, "seconds": seconds, "error": error})
    failed = [f"{row['algorithm']}: {row['error']}" for row in table if row["error"]]
    assert not failed, f"{num_ranks} ranks over {backend}: {'; '.join(failed)}"
    return {"message": f"{num_ranks} ranks as two nodes over {backend}: {', '.join(SUMS)}", "table": table}


def _sums_and_fits(setup: Details, given: Given, rank: int, num_ranks: int) -> Details:
    """Check on each rank, for each algorithm, exact sums, and a fit in which each rank has other images."""
    answer: Details = {}
    for algorithm in SUMS:
        start_s, module, error = time.monotonic(), Small("lars"), ""
        try:
            trainer = _trainer(algorithm, setup, given, num_ranks, callbacks=[_Sums(algorithm)])
            trainer.fit(module, loader(seed=rank))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
        seconds = round(time.monotonic() - start_s, 1)
        answer[algorithm] = {"error": error, "seconds": seconds, "weights": _digest(module.parameters())}
    return answer


def _trainer(algorithm: Any, setup: Details, given: Given, num_ranks: int, **settings: Any) -> pl.Trainer:
    devices = setup["devices_per_host"]
    strategy = HybridAllReduceStrategy(
        comm=Comm(algorithm=algorithm, bucket_bytes=2048),  # several, so that they overtake one another if they can
        ranks_per_node=num_ranks // 2,
        process_group_backend=setup["backend"],
        loss_scale=2.0**10,
        timeout=timedelta(seconds=30),
    )
    layout = {"devices": devices, "num_nodes": num_ranks // devices, "use_distributed_sampler": False}
    return trainer_for(given, "16-true", strategy=strategy, max_epochs=1, **layout, **settings)


class _Sums(pl.Callback):
    """Callback that checks known sums before training, when the process group exists."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rank, world_size, device = trainer.global_rank, trainer.world_size, trainer.strategy.root_device
        topology = Topology.from_ranks_per_node(rank=rank, world_size=world_size, ranks_per_node=world_size // 2)
        plan = CommPlan(algorithm=self.algorithm)
        engine = CommEngine(topology=topology, plan=plan, timeout=timedelta(seconds=30), device=device)
        cases = [(dtype, numel) for dtype in DTYPES for numel in NUMELS]
        mine = [_integers(rank, numel, dtype, device) for dtype, numel in cases]
        last = len(cases) - 1
        sums = [engine.submit(flat, bucket_index=i, is_last=i == last) for i, flat in enumerate(mine)]
        for (dtype, numel), future in zip(cases, sums, strict=True):
            addends = [_integers(other, numel, torch.float32, device) for other in range(world_size)]
            expected = torch.stack(addends).sum(0).to(dtype)
            assert torch.equal(future.wait(), expected), f"{self.algorithm}: the sum of {numel} {dtype} is wrong"
        engine.close()


def _digest(tensors: Any) -> str:
    return str([tensor.detach().cpu().double().flatten().dot(_weights(tensor)).item().hex() for tensor in tensors])


def _weights(tensor: Tensor) -> Tensor:
    return torch.arange(1, tensor.numel() + 1, dtype=torch.float64).sqrt()


# ---- a dead rank -----------------------------------------------------------------------------------------------------


def dead_rank(given: Given) -> Details:
    """Send `kill -9` to one of two ranks in backward: the other ends in an error that names it, in seconds."""
    return _lost_rank(given, signal.SIGKILL)


def dead_rank_of_the_other_class(given: Given) -> Details:
    """Do the same by the other class of NCCL."""
    _use_other_class(given)
    return dead_rank(given)


def stopped_rank(given: Given) -> Details:
    """Stop one of two ranks, as a debugger does: over NCCL nothing breaks, and yet the others name it."""
    _num_gpus_for_ranks(given)
    return _lost_rank(given, signal.SIGSTOP)


def _lost_rank(given: Given, by: signal.Signals) -> Details:
    num_ranks = _num_gpus_for_ranks(given) if given.on_cuda else 2
    backend = "nccl" if given.on_cuda else "gloo"
    setup = {"backend": backend, "devices_per_host": num_ranks}
    killed = given.folder / "killed_s"
    run = partial(_loses_a_rank, setup, killed, by)
    limit_s = 0.9 * given.limit_s
    answers = run_world(given, run, num_ranks=num_ranks, limit_s=limit_s, may_die=(KILLED_RANK,))
    killed_s, table = float(killed.read_text()), []
    for rank, answer in enumerate(answers):
        if rank != KILLED_RANK:
            after_s = answer["noticed_s"] - killed_s
            is_named = f"rank {KILLED_RANK}" in answer["error"]
            table.append({"rank": rank, "seconds until its error": round(after_s, 2), "names the dead": is_named})
            assert is_named, f"rank {rank} must name rank {KILLED_RANK}, and said: {answer['error'][:300]}"
            assert after_s < NAMED_WITHIN_S, f"rank {rank} took {after_s:.1f} s to notice"
    slowest_s = max(row["seconds until its error"] for row in table)
    return {"message": f"{backend}: every other rank named the dead one within {slowest_s} s", "table": table}


def _loses_a_rank(setup: Details, killed: Path, by: signal.Signals, given: Given, rank: int, num_ranks: int) -> Details:
    count = [0]

    def die(grad: Tensor) -> None:
        count[0] += 1
        if count[0] == KILLED_AT:
            killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), by)

    module = Small("lars", on_hidden=die if rank == KILLED_RANK else None)
    try:
        _trainer("hierarchical", setup, given, num_ranks).fit(module, loader(seed=rank))
    except Exception as error:
        return {"noticed_s": time.monotonic(), "error": f"{type(error).__name__}: {error}"}
    return {"noticed_s": time.monotonic(), "error": "no error at all"}


# ---- processes -------------------------------------------------------------------------------------------------------

Run = Callable[[Given, int, int], Details]


def run_world(
    given: Given,
    run: Run,
    *,
    num_ranks: int,
    limit_s: float,
    per_host: int | None = None,
    may_die: tuple[int, ...] = (),
) -> list[Details]:
    """Return what `run(given, rank, num_ranks)` returned on each rank; raise the error or death of any rank.

    `per_host`: ranks on what counts as a host, each with a device of its own; None: all. The others share the devices.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # all is imported, and this process has no context of CUDA's
    paths = [given.folder / f"rank{rank}.json" for rank in range(num_ranks)]
    for path in paths:
        path.unlink(missing_ok=True)
    processes = [
        context.Process(target=_be_rank, args=(run, given, rank, num_ranks, per_host or num_ranks, port, os.getpgrp()))
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        end_s = time.monotonic() + limit_s
        for rank, process in enumerate(processes):
            if rank not in may_die:  # it may be stopped
                process.join(max(0.0, end_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    answers: list[Details] = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    for rank, (answer, code) in enumerate(zip(answers, codes, strict=True)):
        if rank not in may_die and "failed" in answer:
            raise AssertionError(f"rank {rank} of {num_ranks}: {answer['failed']}")
        if rank not in may_die and not answer:
            ended = f"was not done after {limit_s:.0f} s" if code is None else f"ended with code {code}"
            raise AssertionError(f"rank {rank} of {num_ranks} {ended}")
    return answers


def _be_rank(run: Run, given: Given, rank: int, num_ranks: int, per_host: int, port: int, group: int) -> None:
    """Be a rank's process in its check's group, with torchrun's variables: one host, or one per rank."""
    os.setpgid(0, group)
    with (given.folder / f"rank{rank}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    variables = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host}
    variables |= {"GROUP_RANK": rank // per_host, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="gpu_check")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        answer = run(given, rank, num_ranks)
    except BaseException as error:
        answer = {"failed": f"{type(error).__name__}: {error}"[:1000]}
    (given.folder / f"rank{rank}.json").write_text(json.dumps(answer))
    os._exit(0)
