"""Sums between nodes in 8 and 4 bits: the same bits on every rank, whatever carries them; the bytes of the formula."""

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.codec.block_format import BLOCK, OF_A_SUM
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.philox import random_signs
from lightning_hybrid.comm.codec.torch_passes import TorchPasses
from tests.comm.layouts import engine_over, integers, is_even, layouts, name

BITS = pytest.mark.parametrize("bits", [8, 4])
BLOCKS = 40
PLANS = {
    "flat": CommPlan(algorithm="flat"),
    "parallel_flat": CommPlan(algorithm="parallel_flat", chunk_bytes=8 * BLOCK),
    "hierarchical": CommPlan(algorithm="hierarchical", chunk_bytes=8 * BLOCK),
    "two_level": CommPlan(algorithm="two_level", chunk_bytes=8 * BLOCK, check_order=False),
}
LAYOUTS = [nodes for world_size in (2, 3, 4) for nodes in layouts(world_size) if len(nodes) > 1]


def sums_on_rank(nodes, plans, bits, make, numels, steps=(0,), dtype=torch.float32):
    """What this rank holds after its own data was summed under each plan, for each size and step."""
    found = []
    for plan in plans:
        engine = engine_over(nodes, plan, dtype_across_nodes=Codec(bits=bits, seed=3))
        for step in steps:
            engine.coder.begin_step(step)
            for index, numel in enumerate(numels):
                flat, is_last = make(dist.get_rank(), numel, dtype), index == len(numels) - 1
                found.append(engine.submit(flat, bucket_index=index, is_last=is_last).wait())
        engine.close()
    return found


def encoded(values, bits, *, sender, step=0, turn=0):
    """By the definition in torch: the message of one sender."""
    message = torch.empty(Codec(bits=bits).message_bytes(values.numel()), dtype=torch.uint8)
    ids = torch.arange(-(-values.numel() // BLOCK), dtype=torch.int32)
    passes_of(bits).encode(values, ids, (3, step, sender, turn), message, None)
    return message


def passes_of(bits):
    return TorchPasses(bits, random_signs(BLOCK, 3) / 16 if bits == 4 else None)


def expected_sum(node_sums, bits, **when):
    """Messages are added in rank order; with more than two of them the sum is encoded once more."""
    total = torch.empty_like(node_sums[0])
    messages = [encoded(values, bits, sender=sender, **when) for sender, values in enumerate(node_sums)]
    passes_of(bits).add(torch.stack(messages), total)
    if len(node_sums) > 2:
        passes_of(bits).add(encoded(total.clone(), bits, sender=OF_A_SUM, **when)[None], total)
    return total


@BITS
@pytest.mark.sampled(4)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=name)
def test_every_rank_holds_the_bits_of_the_definition_under_every_plan(rank_pool, nodes, bits):
    """Whole numbers: sums inside a node are exact, so that algorithm, chunks and shards may change nothing."""
    world_size = sum(map(len, nodes))
    names = ["hierarchical", *(["two_level"] if is_even(nodes) else [])]
    names += ["flat", "parallel_flat"] if len(nodes) == world_size else []
    numels = [1, 300, BLOCKS * BLOCK + 17]
    per_rank = rank_pool.ranks(world_size).run(sums_on_rank, nodes, [PLANS[n] for n in names], bits, integers, numels)
    for results in per_rank:
        for index, numel in enumerate(numels * len(names)):
            addends = [sum(integers(rank, numel, torch.float32) for rank in node) for node in nodes]
            assert torch.equal(results[index], expected_sum(addends, bits))
