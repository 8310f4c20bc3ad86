"""Description of the ranks in a measurement, with consistency checks and loading of saved results."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.topology import Topology, host_identity
from lightning_hybrid.planning.calibration.microbenchmarks import (
    Measurement,
    Measurements,
    Microbenchmark,
)
from lightning_hybrid.planning.calibration.overhead_fit import MeasuredSetup

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_same_on_all_ranks(answers: list[dict[str, Any]]) -> None:
    """Raise `ValueError` if ranks have different measurement settings.

    With different settings, ranks would wait for each other in different calls.

    >>> check_same_on_all_ranks([{"limit_s": 60, "dtype": "float16"}, {"limit_s": 60, "dtype": "float32"}])
    Traceback (most recent call last):
    ValueError: `measure.dtype` (='float32' on rank 1) must be the same on all ranks, but it is 'float16' on rank 0. \
Start every rank with the same command.
    """
    for rank, values in enumerate(answers):
        for name, value in values.items():
            if value != answers[0][name]:
                raise ValueError(
                    f"`measure.{name}` (={value!r} on rank {rank}) must be the same on all ranks, but it is "
                    f"{answers[0][name]!r} on rank 0. Start every rank with the same command."
                )


def read_measurements(path: str) -> tuple[Measurements, MeasuredSetup]:
    """Read the measurements and the setup of an earlier run from its `summary.json`.

    Raises:
        ValueError: The file is not a summary of measurements.
    """
    try:
        answers = json.loads(Path(path).read_text())
        times_s = {
            Microbenchmark(
                kind=sample["kind"], what=sample["what"], num_bytes=sample["num_bytes"]
            ): sample["times_s"]
            for sample in answers["samples"]
        }
        return Measurements(times_s=times_s, took_s=answers["took_s"]), MeasuredSetup(
            **answers["world"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`samples` (={path}) is not a summary.json written by `lightning-hybrid tune` ({error!r}). Pass such a "
            "file, or leave `samples` out to measure again."
        ) from error


def read_nccl_log(path: str) -> dict[str, Any]:
    """Extract the number of ring channels and the NCCL version from an NCCL log.

    The keys are fields of `MeasuredSetup`. NCCL logs the channels of its graph when it searches for rings ("Pattern
    4"). All-reduces use copies of these channels.

    Raises:
        ValueError: The file contains no channels.
    """
    text = Path(path).read_text(errors="replace") if Path(path).is_file() else ""
    channels = re.findall(r"NCCL INFO Pattern 4, .*?nChannels ([1-9]\d*)", text)
    if not channels:
        raise ValueError(
            f"`nccl_log` (={path}) is not an NCCL log that contains the number of ring channels. Run any job with "
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH to create such a log, or leave `nccl_log` out."
        )
    version = re.search(r"NCCL version (\d+\.\d+\.\d+)", text)
    return {
        "channels": int(channels[-1]),
        **({} if version is None else {"nccl_version": version[1]}),
    }


def world_of(
    topology: Topology, device: torch.device, asked: Measurement, *, inside: Any
) -> MeasuredSetup:
    """Collect the nodes, ranks and cores of all processes into a `MeasuredSetup`.

    Each rank sends the identity of its machine and its number of cores. Collective: every rank must
    call it.
    """
    mine = (
        host_identity()[:2],
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
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
