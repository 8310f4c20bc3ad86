"""Parts of tensors: cut at whole blocks, about equal, and each element in one."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_hybrid.optim.fused.cpu import passes
from lightning_hybrid.placement import BLOCK, Part, is_split, spans

numels, nums, blocks = st.integers(0, 200), st.integers(1, 9), st.integers(1, 20)


@given(numels, nums, blocks)
@example(numel=0, num_parts=3, block=4)
def test_spans_are_cut_at_blocks_and_cover_each_element_once(numel, num_parts, block):
    found = spans(numel, num_parts, block)
    assert len(found) == num_parts
    assert [element for begin, end in found for element in range(begin, end)] == list(range(numel))
    assert all(cut % block == 0 or cut == numel for span in found for cut in span)
    counts = [-(-(end - begin) // block) for begin, end in found]
    assert max(counts) - min(counts) <= 1


@given(numels, nums, blocks)
def test_a_tensor_is_split_where_no_part_is_empty(numel, num_parts, block):
    is_full = num_parts > 1 and all(begin < end for begin, end in spans(numel, num_parts, block))
    assert is_split(numel, num_parts, block) == is_full


def test_a_part_is_of_whole_blocks_of_the_passes():
    """The chunk of the Triton kernels is held against it in `optim/fused/cuda`."""
    assert BLOCK % passes._BLOCK == 0
    Part(numel=3 * BLOCK + 5, begin=3 * BLOCK, end=3 * BLOCK + 5)
    Part(numel=5, begin=5, end=5)  # empty


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ((-1, 5), r"`begin` and `end` \(=-1, 5\) must be within the tensor, whose `numel` is 40000"),
        ((0, 40_001), "must be within"),
        ((BLOCK, 0), "must be within"),
        ((100, BLOCK), r"`begin` \(=100\) must be a multiple of 16384 or the tensor's end \(40000\).*`spans`"),
        ((0, 100), r"`end` \(=100\) must be a multiple of 16384"),
    ],
    ids=str,
)
def test_a_part_that_cuts_a_block_or_leaves_the_tensor_is_refused(span, message):
    with pytest.raises(ValueError, match=message):
        Part(numel=40_000, begin=span[0], end=span[1])
