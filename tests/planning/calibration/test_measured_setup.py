"""Setup of a link measurement: ranks agree on what to measure, and report their common properties."""

import os
from dataclasses import asdict

import pytest
import torch

from lightning_hybrid.comm.topology import Topology
from lightning_hybrid.planning.calibration.measured_setup import (
    check_same_on_all_ranks,
    read_nccl_log,
    world_of,
)
from lightning_hybrid.planning.calibration.microbenchmarks import Measurement


def test_ranks_that_would_measure_different_things_are_refused():
    content = [asdict(Measurement()), asdict(Measurement(limit_s=3.0))]
    with pytest.raises(
        ValueError, match=r"`measure.limit_s` \(=3.0 on rank 1\) must be the same on all ranks"
    ):
        check_same_on_all_ranks(content)
    check_same_on_all_ranks(content[:1] * 2)


LOG = """\
node0:1:2 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
node0:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 30.000000/30.000000, type NVL/PIX, sameChannels 1
node0:1:2 [0] NCCL INFO Pattern 3, crossNic 0, nChannels 0, bw 0.000000/0.000000, type LOC/PIX, sameChannels 1
node0:1:2 [0] NCCL INFO 24 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer
"""
"""Lines as in issues 1189 and 1197 of github.com/NVIDIA/nccl, with another host's name."""


def test_channels_come_from_a_log_of_nccl(tmp_path):
    (tmp_path / "log").write_text(LOG)
    assert read_nccl_log(str(tmp_path / "log")) == {"channels": 12, "nccl_version": "2.27.5"}
    (tmp_path / "log").write_text(LOG.replace("Pattern 4", "Pattern 1"))
    with pytest.raises(ValueError, match=r"`nccl_log` \(=.*log\) is not an NCCL log that contains"):
        read_nccl_log(str(tmp_path / "log"))


def world_on_rank():
    asked = Measurement(dtype="float32")
    topology = Topology(rank=torch.distributed.get_rank(), nodes=((0, 2), (1, 3)))
    return world_of(topology, torch.device("cpu"), asked, inside="pci")


def test_ranks_of_one_machine_share_its_cores(four_ranks):
    results = four_ranks.run(world_on_rank, timeout_s=180.0)
    for rank, world in enumerate(results):
        assert world == results[0], f"rank {rank}"
    assert results[0].num_shared_cores == len(os.sched_getaffinity(0))
    assert results[0].is_interleaved
    assert (results[0].num_nodes, results[0].ranks_per_node, results[0].itemsize) == (2, 2, 4)
