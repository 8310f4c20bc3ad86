"""Memory of a rank compared with measured and published values, and the order of suggested settings."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_hybrid.placement import BLOCK
from lightning_hybrid.planning.estimates.memory import (
    HOST_LINK_BYTES_PER_S,
    USABLE_SHARE,
    MemoryChoices,
    MemoryNeed,
    StateBytes,
    shared_share,
)
from recipes.networks.resnet import ResNet
from tests.checkout import ROOT

RECORD = ROOT / "recipes" / "records" / "memory" / "2026-11-23_2-ranks_2-core-cpu"


def resnet_50():
    with torch.device("meta"):
        return [parameter.numel() for parameter in ResNet().parameters()]


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_bytes_per_parameter_are_those_measured_on_two_ranks(precision):
    """Only the engine's buffers, 0.1, are fitted. The record contains the measured rows."""
    rows = [json.loads(line) for line in (RECORD / "rows.jsonl").read_text().splitlines()[1:]]
    measured = {}
    for row in rows:
        if row["precision"] == precision:
            measured[row["optimizer"]] = row["bytes_per_parameter"]["total"]
    assert set(measured) == {"sgd", "lars", "lars_fused", "adamw", "lamb", "lamb_fused"}
    for name, total in measured.items():
        optimizer, _, fused = name.partition("_")
        result = StateBytes.of(precision=precision, optimizer=optimizer, copies_gradients=not fused)
        assert result.per_parameter() == pytest.approx(total, abs=0.06), name


def test_zeros_table_follows_from_dtypes():
    """7.5 billion parameters on 64 ranks with K = 12 match Rajbhandari et al. 2019, in GB."""
    adam = StateBytes(weights=2, gradients=2, masters=4, optimizer=8, rest=0)
    part = 1 / 64
    for shares, expected_gb in (
        ({}, 120.0),
        ({"state_share": part}, 31.4),
        ({"state_share": part, "gradient_share": part}, 16.6),
        ({"state_share": part, "gradient_share": part, "weight_share": part}, 1.9),
    ):
        assert round(7.5 * adam.per_parameter(**shares), 1) == expected_gb, shares


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [("lars", (12.1, 8.13, 6.17, 5.31)), ("lamb", (16.1, 10.14, 7.21, 5.92))],
)
def test_a_shared_update_leaves_small_tensors_whole(optimizer, bytes_each):
    """In ResNet-50 on 1, 2, 4 and 8 ranks per node, 3 % of the parameters are in tensors of fewer than 8 parts."""
    state = StateBytes.of(precision="16-true", optimizer=optimizer, copies_gradients=False)
    numels = resnet_50()
    shares = [shared_share(numels, ranks) for ranks in (1, 2, 4, 8)]
    results = [state.per_parameter(state_share=share) for share in shares]
    assert results == pytest.approx(bytes_each, abs=0.006)
    # As many parts as ranks.
    assert shared_share([3 * BLOCK + 1], 4) == 1 / 4
    assert shared_share([3 * BLOCK], 4) == 1.0
    assert results[-1] > state.per_parameter(state_share=1 / 8) + 0.1
    # With the scope "world", tensors of one block stay whole.
    assert shared_share([BLOCK + 1], 64, is_world=True) == 1 / 64
    assert shared_share([BLOCK], 64, is_world=True) == 1.0


def state_of_lars(precision):
    return StateBytes.of(precision=precision, optimizer="lars", copies_gradients=False)


def choices(**changes):
    """Make choices for a hundred blocks of parameters. 8 images have 1 GB of activations, 0.2 GB of it shared."""
    defaults = {
        "states": {"32-true": state_of_lars("32-true"), "16-true": state_of_lars("16-true")},
        "activations": {
            ("32-true", False): (3e8, 1e9),
            ("32-true", True): (2e8, 3.4e8),
            ("16-true", False): (2e8, 5.5e8),
            ("16-true", True): (1e8, 2e8),
        },
        "batch_size": 8,
        "numels": [100 * BLOCK],
        "ranks_per_node": 4,
        "world_size": 8,
        "largest_block": 10**6,
        "forward_s": 1.0,
        "gather_s": 0.1,
        "gather_all_s": 0.3,
    }
    return MemoryChoices(**{**defaults, **changes})


def test_each_list_needs_the_bytes_and_the_time_that_its_settings_do():
    total = 100 * BLOCK
    needs = {need.settings: need for need in choices().needs()}
    # Precision, batches of 8, 4, 2 and 1, sharding, and re-materialisation.
    assert len(needs) == 2 * 4 * 5 * 2
    node = "strategy.shard_update=node"
    again = "model.checkpoint_activations=true"
    all_ranks = "strategy=fsdp2"
    host = "strategy=fsdp2 strategy.offload=true"
    world = "strategy.shard_update=world"  # its gather of 0.3 s is hidden by a forward pass of 1 s
    expected = {
        (): (12.1 * total + 1e9, 0.0),
        ("precision=16-true",): (12.1 * total + 5.5e8, 0.0),
        ("batch_size_per_rank=2",): (12.1 * total + 4e8, 0.0),
        (node,): (9.1 * total + 1e9, 0.1),
        (world,): (8.6 * total + 1e9, 0.0),
        (again,): (12.1 * total + 3.4e8, 1.0),
        (all_ranks,): ((4 + 4 + 4) / 8 * total + 16e6 + 1e9, 0.3),
        (host,): (16e6 + 1e9, 0.3 + 12 * total / 8 / HOST_LINK_BYTES_PER_S),
        ("precision=16-true", host): (10e6 + 5.5e8, 0.3 + 12 * total / 8 / HOST_LINK_BYTES_PER_S),
        ("precision=16-true", "batch_size_per_rank=4", node, again): (
            6.1 * total + 1e8 * (1 + 3 / 7),
            1.1,
        ),
    }
    for settings, (num_bytes, extra_s) in expected.items():
        assert needs[settings].total_bytes == pytest.approx(num_bytes)
        assert needs[settings].extra_s == pytest.approx(extra_s)
    short = choices(forward_s=0.1, activations={("16-true", False): (total, total)})
    need = short.need("16-true", 8, sharing="world")
    assert need.extra_s == pytest.approx(0.2)
    # Weights in transit, with 2 bytes, exceed 1.
    assert need.total_bytes == pytest.approx((5.1 + 2) * total)


def test_what_to_try_alone_comes_by_its_time_for_what_it_saves_and_the_fewest_settings_are_the_smallest_list():
    room = (12.1 * 100 * BLOCK + 6.5e8) / USABLE_SHARE
    results = [need.settings[0] for need in choices().alone(room)]
    # The first two take no time: half of 8 images saves 4e8 bytes, and half precision 4.5e8. Re-materialisation saves
    # 6.6e8 bytes in a second, and sharding within a node 4.9e6 in 0.1 s. FSDP2 saves 1.4e6 bytes in 0.3 s, or 3.8e6
    # with offload. With the scope "world", 5.7e6 bytes cost nothing.
    first = ["precision=16-true", "batch_size_per_rank=4", "strategy.shard_update=world"]
    of_all = ["strategy=fsdp2 strategy.offload=true", "strategy=fsdp2"]
    assert results == [
        *first,
        "model.checkpoint_activations=true",
        "strategy.shard_update=node",
        *of_all,
    ]
    fitting = [need for need in choices().needs() if need.fits(room)]
    assert [need.settings for need in fitting[:2]] == [
        ("precision=16-true",),
        ("batch_size_per_rank=4",),
    ]
    num_settings = [len(need.settings) for need in fitting]
    assert num_settings == sorted(num_settings)
    assert num_settings[0] > 0


def test_what_there_is_nothing_to_share_with_is_not_tried_and_a_tenth_of_the_device_stays_free():
    of_all = [("strategy.shard_update=world",), ("strategy=fsdp2",)]
    host = ("strategy=fsdp2 strategy.offload=true",)
    for world_size, expected in ((1, [(), host]), (2, [(), *of_all, host])):
        activations = {("32-true", False): (1.0, 1.0)}
        alone = choices(activations=activations, ranks_per_node=1, batch_size=1)
        needs = replace(alone, world_size=world_size).needs()
        assert [need.settings for need in needs] == expected
    need = MemoryNeed(settings=(), state_bytes=60.0, activation_bytes=30.0)
    assert need.fits(90 / USABLE_SHARE)
    assert not need.fits(89 / USABLE_SHARE)


def test_what_was_not_measured_is_refused():
    with pytest.raises(
        ValueError,
        match=r"`precision` \(='16-mixed'\) must be one of '16-true', 'bf16-true', '32-tr",
    ):
        StateBytes.of(precision="16-mixed", optimizer="lars", copies_gradients=False)
    with pytest.raises(
        ValueError, match=r"`optimizer` \(='lion'\) must be one of 'sgd', 'lars', 'adamw', 'lamb'"
    ):
        StateBytes.of(precision="16-true", optimizer="lion", copies_gradients=False)


@pytest.mark.parametrize("memory_bytes", [3e9, 4e9, 80e9])
def test_the_largest_batch_fits_and_one_more_image_does_not(memory_bytes):
    of_run = choices()
    largest = of_run.largest_batch(memory_bytes)
    assert largest > 0
    assert of_run.need("32-true", largest).fits(memory_bytes)
    assert not of_run.need("32-true", largest + 1).fits(memory_bytes)


def test_no_batch_fits_beside_a_state_that_fills_the_memory():
    assert choices().largest_batch(12.1 * 100 * BLOCK) == 0


def test_all_activations_of_a_batch_of_one_image_grow_with_the_batch():
    of_one = choices(batch_size=1, activations={("32-true", False): (1e9, 1e9)})
    room = of_one.need("32-true", 1).state_bytes + 2.5e9
    assert of_one.largest_batch(room / USABLE_SHARE) == 2
