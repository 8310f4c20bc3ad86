"""Ranks and batches of a step, by arithmetic alone."""

import re

import pytest

from recipes.cli.world import accumulation, num_ranks, world_from_launcher

LAUNCHERS = "LOCAL_WORLD_SIZE GROUP_WORLD_SIZE SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NNODES SLURM_JOB_NAME".split()
SLURM = {"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ({}, ("auto", 1)),
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "3"}, (4, 3)),
        (SLURM, (8, 2)),
        (SLURM | {"SLURM_JOB_NAME": "bash"}, ("auto", 1)),  # an interactive shell: Lightning starts the ranks
        ({name: SLURM[name] for name in ("SLURM_NTASKS", "SLURM_NNODES")}, ("auto", 2)),
        (SLURM | {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, (4, 2)),  # torchrun in a SLURM job
    ],
    ids=str,
)
def test_the_world_is_the_launchers(monkeypatch, variables, world):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (world_from_launcher("devices", "auto"), world_from_launcher("num_nodes", 1)) == world


@pytest.mark.parametrize(
    ("share", "limit", "rounds"),
    [(100, 100, 1), (101, 101, 1), (100, 99, 2), (99, 50, 3), (90, 40, 3), (1, 1, 1), (121, 70, None), (106, 32, None)],
)
def test_a_limit_takes_the_fewest_equal_batches(share, limit, rounds):
    if rounds is not None:
        assert accumulation(2 * share, None, limit, 2, 1) == rounds
        assert all(share % fewer or share // fewer > limit for fewer in range(1, rounds))
        return
    with pytest.raises(
        ValueError, match=rf"`global_batch_size` \(={2 * share}\) must divide into equal batches"
    ) as told:
        accumulation(2 * share, None, limit, 2, 1)
    for advised in re.findall(r"=(\d+) or (\d+);", str(told.value))[0]:  # what it advises fits
        assert accumulation(int(advised), None, limit, 2, 1) >= 1


def test_the_paper_s_batch_reaches_any_number_of_gpus_and_a_batch_of_a_rank_wins_over_the_limit():
    """65,536 images and at most 128 at a time."""
    for ranks, rounds in ((2048, 1), (512, 1), (256, 2), (8, 64), (1, 512)):
        assert accumulation(65536, None, 128, 1, ranks) == rounds
    assert accumulation(256, 64, 8, 2, 1) == 2


def test_devices_that_are_to_be_found_are_the_gpus_but_one_on_a_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert num_ranks("auto", 3) == num_ranks(-1, 3, "gpu") == 12
    assert num_ranks("auto", 3, "cpu") == num_ranks(-1, 3, "cpu") == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert num_ranks("auto", 3) == 3
