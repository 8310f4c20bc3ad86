"""Layouts of parts: of whatever sizes on however many ranks, each element has one owner, one place and arrives once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.comm.bucket_layout import chunk_numels
from lightning_hybrid.placement import BLOCK, flattened, has_gaps, is_split
from lightning_hybrid.strategy.shard_update.gradient_scatter import packing_of
from lightning_hybrid.strategy.shard_update.shard_exchange import chunks_of
from lightning_hybrid.strategy.shard_update.sharded_fit import spans_by_rank

RANKS = st.integers(2, 5)
SIZES = st.lists(st.integers(1, 12 * BLOCK), min_size=1, max_size=6)
SPANS = st.integers(1, 4).flatmap(
    lambda num: st.lists(st.lists(st.integers(0, 40), min_size=num, max_size=num), min_size=1, max_size=5)
)


@given(RANKS, SIZES)
def test_every_element_has_one_owner_and_ranks_hold_about_the_same(num_ranks, sizes):
    sizes = [size for size in sizes if is_split(size, num_ranks)]
    found = spans_by_rank(sizes, num_ranks)
    for size, spans in zip(sizes, found, strict=True):
        edges = sorted(spans)
        assert edges[0][0] == 0
        assert edges[-1][1] == size
        assert all(one[1] == other[0] and one[0] < one[1] for one, other in pairwise(edges))
    held = [sum(spans[rank][1] - spans[rank][0] for spans in found) for rank in range(num_ranks)]
    assert max(held) - min(held) <= 2 * BLOCK


@given(SPANS, st.integers(1, 16))
def test_chunks_carry_every_slice_once_and_in_order(lengths, numel):
    """`lengths`: of each tensor, by rank."""
    spans = []
    for of_ranks in lengths:
        ends = [sum(of_ranks[: rank + 1]) for rank in range(len(of_ranks))]
        spans.append([(end - length, end) for end, length in zip(ends, of_ranks, strict=True)])
    chunks = chunks_of(spans, numel)
    for rank in range(len(spans[0])):
        slices = [one for chunk in chunks for one in chunk.slices[rank]]
        carried = [(index, element) for index, begin, end in slices for element in range(begin, end)]
        assert carried == [(index, element) for index, one in enumerate(spans) for element in range(*one[rank])]
        assert all(
            sum(end - begin for _, begin, end in chunk.slices[rank]) <= min(numel, chunk.numel) for chunk in chunks
        )


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 60), st.data())
def test_a_packed_bucket_has_every_element_in_its_owner_s_shard(num_ranks, num_chunks, shard, data):
    alignment = num_ranks * 4
    numel = shard * alignment
    chunks = list(chunk_numels(numel, num_chunks, alignment=alignment)) if num_chunks > 1 else [numel]
    lengths = [data.draw(st.integers(0, numel // num_ranks)) for _ in range(num_ranks)]
    owned, begin = [], 0
    for length in lengths:
        cut = data.draw(st.integers(0, length))
        owned.append([one for one in ((begin, begin + cut), (begin + cut, begin + length)) if one[0] < one[1]])
        begin += length
    shards = []
    begin = 0
    for chunk in chunks:
        step = chunk // num_ranks
        shards.append([range(begin + rank * step, begin + (rank + 1) * step) for rank in range(num_ranks)])
        begin += chunk
    packing = packing_of(owned, [], chunks)
    for rank, moves in enumerate(packing.moves):
        places = [place for at, (b, e) in moves for place in range(at, at + e - b)]
        assert len(set(places)) == len(places)
        assert all(any(place in of_chunk[rank] for of_chunk in shards) for place in places)
        carried = [element for _, (b, e) in moves for element in range(b, e)]
        assert carried == [element for one in owned[rank] for element in range(*one)]


def test_a_row_in_the_order_of_memory_is_a_view_where_there_are_no_gaps():
    weight = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    row = flattened(weight, weight)
    row[5] = 7.0
    assert weight.permute(0, 2, 3, 1).reshape(-1)[5] == 7.0
    assert torch.equal(flattened(weight.contiguous(), weight), row)  # another order: a copy in that of `like`
    assert not has_gaps(weight)
    assert has_gaps(weight[:, ::2])
