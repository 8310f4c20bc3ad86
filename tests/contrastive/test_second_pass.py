"""Second pass of `GlobalBatch`: a step of user code equals the step with all activations kept."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lightning_hybrid.contrastive import GlobalBatch
from tests.contrastive.networks import (
    CHUNK,
    DEPENDS_ON_PARTS,
    DRAWS,
    LOSS,
    NETWORKS,
    PAIRS,
    Network,
    SpectralNorm,
    assert_same_step,
    data,
    seeded,
    with_activations_kept,
    with_global_batch,
)
from tests.toy import error_of


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_equals_the_step_with_all_activations_kept(name):
    """The step has equal chunks, a smaller last chunk, or a single chunk."""
    for num_pairs, chunk in ((PAIRS, CHUNK), (PAIRS - 2, CHUNK), (PAIRS, PAIRS)):
        x = data(num_pairs)
        assert_same_step(
            with_global_batch(NETWORKS[name], x, chunk),
            with_activations_kept(NETWORKS[name], x, chunk),
        )


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - DEPENDS_ON_PARTS - DRAWS))
def test_gradients_are_those_of_the_whole_batch(name):
    assert_same_step(
        with_global_batch(NETWORKS[name], data()),
        with_activations_kept(NETWORKS[name], data(), PAIRS),
    )


def test_gradients_under_spectral_norm_are_those_of_the_whole_batch_once_its_vectors_have_converged():
    def make():
        network = SpectralNorm()
        with torch.no_grad():
            for _ in range(200):
                network.embed(data())
        return network

    expected = with_activations_kept(make, data(), PAIRS).grads
    result = with_global_batch(make, data()).grads
    assert result.keys() == expected.keys()
    for name, grad in result.items():
        assert (grad - expected[name]).norm() <= 2e-6 * expected[name].norm(), name


def steps_on_rank():
    """Compare each network with the run that keeps activations, and return the gradients."""
    x = data(2 * PAIRS).chunk(dist.get_world_size())[dist.get_rank()]
    grads = {}
    for name, make in NETWORKS.items():
        result = with_global_batch(make, x)
        assert_same_step(result, with_activations_kept(make, x))
        grads[name] = result.grads
    return grads


@pytest.mark.parametrize("world", ["two_ranks", "four_ranks"])
def test_a_step_of_several_ranks_equals_the_step_with_all_activations_kept(world, request):
    """With four ranks, each rank has a chunk of four pairs and a chunk of two."""
    ranks = request.getfixturevalue(world)
    by_rank = ranks.run(steps_on_rank)
    for name in NETWORKS.keys() - DEPENDS_ON_PARTS - DRAWS - {"gradient hooks"}:
        whole = with_activations_kept(NETWORKS[name], data(2 * PAIRS), 2 * PAIRS)
        for parameter, expected in whole.grads.items():
            mean = sum(grads[name][parameter] for grads in by_rank) / len(by_rank)
            assert (mean - expected).norm() <= 2e-6 * expected.norm(), (name, parameter)


def sharded_on_rank():
    network = seeded(Network)
    fully_shard(network.net)
    return error_of(GlobalBatch(LOSS, chunk=CHUNK), network.embed, data())


def test_sharded_parameters_are_refused_on_every_rank(two_ranks):
    expected = "ValueError: `net.0.weight` (a DTensor) must be a plain parameter"
    for rank, error in enumerate(two_ranks.run(sharded_on_rank)):
        assert error.startswith(expected), f"rank {rank}"
