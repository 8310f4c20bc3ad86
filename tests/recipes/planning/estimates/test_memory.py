"""Bytes of a rank against what was measured and published, and the order of what to try."""

import json

import pytest
import torch

from lightning_hybrid.placement import BLOCK
from recipes.networks.resnet import ResNet
from recipes.planning.estimates.memory import USABLE_SHARE, MemoryNeed, StateBytes, memory_needs, shared_share
from tests.checkout import ROOT

RECORD = ROOT / "recipes" / "records" / "memory" / "2026-11-23_2-ranks_2-core-cpu"
HALF_LARS = StateBytes.of(precision="16-true", optimizer="lars", copies_gradients=False)


def resnet_50():
    with torch.device("meta"):
        return [parameter.numel() for parameter in ResNet().parameters()]


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_bytes_per_parameter_are_those_measured_on_two_ranks(precision):
    """Nothing is fitted but the engine's buffers, 0.1; the measured rows are in the record."""
    rows = [json.loads(line) for line in (RECORD / "rows.jsonl").read_text().splitlines()[1:]]
    measured = {row["optimizer"]: row["bytes_per_parameter"]["total"] for row in rows if row["precision"] == precision}
    assert set(measured) == {"sgd", "lars", "lars_fused", "adamw", "lamb", "lamb_fused"}
    for name, total in measured.items():
        optimizer, _, fused = name.partition("_")
        found = StateBytes.of(precision=precision, optimizer=optimizer, copies_gradients=not fused)
        assert found.per_parameter() == pytest.approx(total, abs=0.06), name


def test_zeros_table_follows_from_dtypes():
    """7.5 billion parameters on 64 ranks, K = 12: Rajbhandari et al. 2019, in GB."""
    adam = StateBytes(weights=2, gradients=2, masters=4, optimizer=8, rest=0)
    part = 1 / 64
    stages = [
        {},
        {"state_share": part},
        {"state_share": part, "gradient_share": part},
        {"state_share": part, "gradient_share": part, "weight_share": part},
    ]
    assert [round(7.5 * adam.per_parameter(**shares), 1) for shares in stages] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"), [("lars", (12.1, 8.13, 6.17, 5.31)), ("lamb", (16.1, 10.14, 7.21, 5.92))]
)
def test_a_shared_update_leaves_small_tensors_whole(optimizer, bytes_each):
    """ResNet-50 on 1, 2, 4 and 8 ranks per node; 3 % of it is in tensors of fewer than 8 parts."""
    state, numels = StateBytes.of(precision="16-true", optimizer=optimizer, copies_gradients=False), resnet_50()
    found = [state.per_parameter(state_share=shared_share(numels, ranks)) for ranks in (1, 2, 4, 8)]
    assert found == pytest.approx(bytes_each, abs=0.006)
    assert (shared_share([3 * BLOCK + 1], 4), shared_share([3 * BLOCK], 4)) == (1 / 4, 1.0)  # as many parts as ranks
    assert found[-1] > state.per_parameter(state_share=1 / 8) + 0.1


def test_what_to_try_comes_in_order_and_each_needs_what_it_should():
    numels = [100 * BLOCK]
    needs = memory_needs(
        HALF_LARS,
        numels,
        ranks_per_node=4,
        world_size=8,
        activation_bytes=1e9,
        checkpointed_bytes=3e8,
        largest_block=10**6,
    )
    shared, again = "strategy.shard_update=node", "model.checkpoint_activations=true"
    assert [need.settings for need in needs] == [(), (shared,), (again,), (shared, again), ("strategy=fsdp2", again)]
    total = sum(numels)
    assert needs[0].total_bytes == pytest.approx(12.1 * total + 1e9)
    assert needs[1].total_bytes == pytest.approx(6.1 * total + 1e9)
    assert needs[2].total_bytes == pytest.approx(12.1 * total + 3e8)
    assert needs[3].total_bytes == pytest.approx(6.1 * total + 3e8)
    assert needs[4].total_bytes == pytest.approx((4 + 4 + 4) / 8 * total + 6e6 + 3e8)


def test_what_there_is_nothing_to_share_with_is_not_tried_and_a_tenth_of_the_device_stays_free():
    alone = {"activation_bytes": 1.0, "checkpointed_bytes": None, "largest_block": 1}
    for world_size, expected in ((1, [()]), (2, [(), ("strategy=fsdp2",)])):
        needs = memory_needs(HALF_LARS, [10], ranks_per_node=1, world_size=world_size, **alone)
        assert [need.settings for need in needs] == expected
    need = MemoryNeed(settings=(), state_bytes=60.0, activation_bytes=30.0, cost="")
    assert need.fits(90 / USABLE_SHARE)
    assert not need.fits(89 / USABLE_SHARE)


def test_what_was_not_measured_is_refused():
    with pytest.raises(ValueError, match=r"`precision` \(='16-mixed'\) must be one of '16-true', 'bf16-true', '32-tr"):
        StateBytes.of(precision="16-mixed", optimizer="lars", copies_gradients=False)
    with pytest.raises(ValueError, match=r"`optimizer` \(='lion'\) must be one of 'sgd', 'lars', 'adamw', 'lamb'"):
        StateBytes.of(precision="16-true", optimizer="lion", copies_gradients=False)
