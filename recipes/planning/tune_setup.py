"""Preparation of `recipes/tune.py`: clear refusals, ranks that agree, and the step to plan for."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from omegaconf import DictConfig
from torch import nn

from lightning_hybrid.checks import first_line
from lightning_hybrid.comm import CommPlan, Topology, host_identity
from lightning_hybrid.planning.workload import StepWorkload
from recipes.cli import config_check
from recipes.cli.ranges import Count, Positive, Ranks
from recipes.cli.usage import command
from recipes.cli.world import num_ranks
from recipes.planning.calibration.microbenchmarks import Measurement, Measurements, Microbenchmark, validate
from recipes.planning.calibration.overhead_fit import MeasuredSetup
from recipes.planning.layers import layers_of, work_of

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}

KEYS: dict[str, Any] = {
    "world.accelerator": str,
    "world.devices": Ranks | list[int] | str,
    "world.num_nodes": Ranks,
    "name": str,
    "about": str | None,
    "measure": Measurement,
    "samples": str | None,
    "inside": Literal["nvlink", "pci"],
    "nccl_log": str | None,
    "image_shape": list[Count],
    "batch_size_per_rank": Count,
    "images_per_s": Positive | None,
    "plan": CommPlan,
    "num_shown": Count,
    "run_dir": str,
    "model": nn.Module,
}


def check_tune_keys(cfg: DictConfig) -> None:
    """Refuse, before any rank is started, what would make the measurement useless.

    Raises:
        ValueError: A hole, one rank, a name that is no file's, a folder that cannot be written.
    """
    config_check.check(cfg, KEYS)
    if cfg.samples is None and num_ranks(cfg.world.devices, cfg.world.num_nodes, cfg.world.accelerator) == 1:
        raise ValueError(
            f"`world.devices` (={cfg.world.devices}) must make two ranks or more with `world.num_nodes` "
            f"(={cfg.world.num_nodes}): links are between ranks, and one has none. Give world.devices=<ranks of a "
            "node>, or start it by torchrun on several nodes."
        )
    if not str(cfg.name).isidentifier():
        raise ValueError(f"`name` (={cfg.name}) must be letters, digits and _: it becomes cluster=<name>.")
    folder = Path(cfg.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before the ranks start: what they measure for minutes must have a place.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"`hydra.run.dir` (={folder}) must be a folder that can be written: {error.strerror}. What is measured "
            "would be lost: give hydra.run.dir=<folder>."
        ) from error


def configured_work(cfg: DictConfig) -> StepWorkload:
    """Return the step to plan for: of a rate, or gradients that nothing hides."""
    with torch.device("meta"):
        model = instantiate(cfg.model)
    layers = layers_of(model, list(cfg.image_shape))
    if cfg.images_per_s is not None:
        return work_of(layers, batch_size=cfg.batch_size_per_rank, images_per_s=cfg.images_per_s)
    numels = (numel for layer in reversed(layers) for numel in reversed(layer.numels))
    return StepWorkload(forward_s=0.0, gradients=tuple((numel, 0.0) for numel in numels))


def strategy(timeout_s: float) -> DDPStrategy:
    """Make the strategy that starts or joins the ranks, and does not wait for ever."""
    return DDPStrategy(timeout=timedelta(seconds=timeout_s))


def end_with_parent() -> None:
    """Let a rank that another process has started end within a second of it: it would wait for ranks that are gone."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def connect(fabric: Fabric, asked: Measurement) -> Topology:
    """Start or join the ranks; return which ranks share a node.

    Collective.

    Raises:
        ValueError: They do not find each other, were asked for different things, or nodes are not equal.
    """
    try:
        fabric.launch()
        topology = Topology.discover()
        answers: list[Any] = [None] * topology.world_size
        dist.all_gather_object(answers, asdict(asked))
    except RuntimeError as error:
        raise ValueError(
            f"`world` (={fabric.world_size} ranks) must be able to connect: {first_line(error)}. Are all "
            f"ranks started, within measure.timeout_s={asked.timeout_s:g} s of each other? Do they reach each other on "
            "the interface that GLOO_SOCKET_IFNAME (on GPUs NCCL_SOCKET_IFNAME) names, or, if unset, that of the "
            "host's name?"
        ) from error
    check_same_on_all_ranks(answers)
    validate(topology)
    return topology


def check_same_on_all_ranks(answers: list[dict[str, Any]]) -> None:
    """Refuse ranks that would measure different things, and so wait for each other in different places.

    >>> check_same_on_all_ranks([{"limit_s": 60, "dtype": "float16"}, {"limit_s": 60, "dtype": "float32"}])
    Traceback (most recent call last):
    ValueError: `measure.dtype` (='float32' on rank 1) must be the same on all ranks: it is 'float16' on rank 0. Start \
every rank with the same command.
    """
    for rank, values in enumerate(answers):
        for name, value in values.items():
            if value != answers[0][name]:
                raise ValueError(
                    f"`measure.{name}` (={value!r} on rank {rank}) must be the same on all ranks: it is "
                    f"{answers[0][name]!r} on rank 0. Start every rank with the same command."
                )


def read_measurements(path: str) -> tuple[Measurements, MeasuredSetup]:
    """Return what an earlier run measured, and on what.

    Raises:
        ValueError: It is no summary of one.
    """
    try:
        answers = json.loads(Path(path).read_text())
        times_s = {
            Microbenchmark(kind=one["kind"], what=one["what"], num_bytes=one["num_bytes"]): one["times_s"]
            for one in answers["samples"]
        }
        return Measurements(times_s=times_s, took_s=answers["took_s"]), MeasuredSetup(**answers["world"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`samples` (={path}) must be the summary.json that `{command('tune')}` wrote: {error!r}. Leave it out to "
            "measure."
        ) from error


def read_nccl_log(path: str) -> dict[str, Any]:
    """Return the channels of NCCL's rings and its version, as fields of `MeasuredSetup`.

    NCCL logs the channels of its graph where it searches for rings ("Pattern 4"); it sums on copies of them.

    Raises:
        ValueError: There are none in this file.
    """
    text = Path(path).read_text(errors="replace") if Path(path).is_file() else ""
    channels = re.findall(r"NCCL INFO Pattern 4, .*?nChannels ([1-9]\d*)", text)
    if not channels:
        raise ValueError(
            f"`nccl_log` (={path}) must be a log of NCCL with its graph: channels are read from it. Run any job with "
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH, or leave it out."
        )
    version = re.search(r"NCCL version (\d+\.\d+\.\d+)", text)
    return {"channels": int(channels[-1]), **({} if version is None else {"nccl_version": version[1]})}


def world_of(topology: Topology, device: torch.device, asked: Measurement, *, inside: Any) -> MeasuredSetup:
    """Describe the setup. Collective: every rank sends its machine and its cores."""
    mine = (host_identity()[:2], len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    answers: list[Any] = [None] * topology.world_size
    dist.all_gather_object(answers, mine)
    is_one_machine = len({machine for machine, _ in answers}) == 1
    return MeasuredSetup(
        num_nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node or 1,
        on_cuda=device.type == "cuda",
        itemsize=ITEMSIZE[asked.dtype],
        num_shared_cores=answers[0][1] if is_one_machine and device.type == "cpu" else None,
        is_interleaved=any(node != tuple(range(node[0], node[-1] + 1)) for node in topology.nodes),
        inside=inside,
    )
