"""Parts of tensors that ranks share in an update: sizes, forms, the number of reductions, and cuts of norms.

Ranks are threads here, with a mock reduction. `test_contract.py` uses processes.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.foreach_ops import in_blocks
from lightning_hybrid.optim.fused.cpu import passes
from lightning_hybrid.optim.trust_ratio import (
    ShardedVector,
    combined_norms,
    norms_over_ranks,
    tensor_norms,
)
from lightning_hybrid.placement import BLOCK, Part, is_split, spans
from tests.optim.makers import FUSED, PATHS, OptimizerPair, Parts, Whole, normals, on_threads
from tests.reference.families import FAMILIES

RULES = {name: (LARS, options) for name, (_, options) in FAMILIES.items()}
RULES |= {
    "no momentum": (LARS, {"momentum": 0.0}),
    "lamb": (LAMB, {}),
    "lamb, bounded": (LAMB, {"max_grad_norm": 1.0}),
}
numels = st.builds(
    lambda num_blocks, extra: max(1, num_blocks * BLOCK + extra),
    st.integers(0, 5),
    st.integers(-300, 300),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread, because the order in which a tensor is summed depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=6)
@given(st.lists(numels, min_size=2, max_size=4), st.integers(2, 5), st.sampled_from(sorted(RULES)))
# The last block has one element, or one row of a list's norm.
@example([3 * BLOCK + 1, 2 * BLOCK + 256], 3, "barlow")
@example([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1], 2, "paper")
def test_tensors_of_any_size_over_any_number_of_ranks_in_one_sum_a_step(
    path, sizes, num_ranks, name
):
    rule, options = RULES[name]
    num_sums = []

    def on_rank(rank, add_up_):
        def counted(table):
            num_sums.append(rank)
            add_up_(table)

        layout = Parts(rank, num_ranks, counted)
        shapes = [(size,) for size in sizes]
        both = OptimizerPair(
            layout, PATHS[path], rule, shapes=shapes, whole_path=PATHS[path], **options
        )
        return both.steps(2).distance()

    assert on_threads(num_ranks, on_rank) == [0.0] * num_ranks
    num_in_a_step = 0
    if any(is_split(size, num_ranks) for size in sizes):
        num_in_a_step = 1 if rule is LARS else 2
    assert len(num_sums) == 2 * num_in_a_step * num_ranks


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("is_in_blocks", [False, True], ids="in_blocks={}".format)
def test_the_norm_of_a_lists_parts_is_that_of_the_whole_but_for_the_order_of_sums(
    is_in_blocks, dtype
):
    """The bound is 1e-13. A single sum of a tensor, or of a small last block in another dtype, would be 1e-9 off."""
    for numel in (2 * BLOCK + 1, 2 * BLOCK + 40_000, (1 << 19) + 300):
        whole = normals(numel, seed=1).to(dtype)
        if is_in_blocks:
            blocks = in_blocks([whole])
        else:
            blocks = [[[whole]]]
        expected = combined_norms([tensor_norms(block) for (block,) in blocks])

        def norm(rank, add_up_, whole=whole):
            begin, end = spans(whole.numel(), 3)[rank]
            part = Part(numel=whole.numel(), begin=begin, end=end)
            span = whole[begin:end]
            pieces = span.split(5 * BLOCK)
            vector = ShardedVector(part=part, pieces=pieces, is_in_blocks=is_in_blocks)
            norms, _ = norms_over_ranks({span: [vector]}, torch.zeros(()), add_up_)
            return norms[span][0]

        norms = on_threads(3, norm)
        assert norms[0] == norms[1] == norms[2]
        torch.testing.assert_close(norms[0], expected[0], rtol=1e-13, atol=0)


def test_parts_that_come_after_a_first_step_are_seen():
    tables = []
    both = OptimizerPair(Whole(), FUSED, shapes=[(2 * BLOCK,), (3,)]).steps(1)
    both.optimizer.parts = {both.params[0]: Part(numel=5 * BLOCK, begin=0, end=2 * BLOCK)}
    both.optimizer.add_up_ = tables.append
    both.step(2)
    (table,) = tables
    assert table.numel() == 1 + 2 * (5 + 1)  # the verdict, and twice all blocks of both tensors


def test_a_part_has_no_direction_of_its_own():
    parts = Parts(0, 2, lambda table: None)
    both = OptimizerPair(parts, {}, shapes=[(2 * BLOCK,), (3,)], direction="orthogonal")
    with pytest.raises(
        ValueError, match=r"`direction` .*requires full tensors.*0 to 16384 of 32768.*`work_group`"
    ):
        both.step(1)


numels = st.integers(0, 200)
nums = st.integers(1, 9)
blocks = st.integers(1, 20)


@given(numels, nums, blocks)
@example(numel=0, num_parts=3, block=4)
def test_spans_are_cut_at_blocks_and_cover_each_element_once(numel, num_parts, block):
    results = spans(numel, num_parts, block)
    assert len(results) == num_parts
    elements = [element for begin, end in results for element in range(begin, end)]
    assert elements == list(range(numel))
    for begin, end in results:
        assert begin % block == 0 or begin == numel
        assert end % block == 0 or end == numel
    counts = [-(-(end - begin) // block) for begin, end in results]
    assert max(counts) - min(counts) <= 1


@given(numels, nums, blocks)
def test_a_tensor_is_split_where_no_part_is_empty(numel, num_parts, block):
    is_full = num_parts > 1 and all(begin < end for begin, end in spans(numel, num_parts, block))
    assert is_split(numel, num_parts, block) == is_full


def test_a_part_is_of_whole_blocks_of_the_passes():
    """`optim/fused/cuda` compares the chunk of the Triton kernels with this block."""
    assert BLOCK % passes._BLOCK == 0
    Part(numel=3 * BLOCK + 5, begin=3 * BLOCK, end=3 * BLOCK + 5)
    Part(numel=5, begin=5, end=5)  # empty


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (
            (-1, 5),
            r"`begin` and `end` \(=-1, 5\) must be within the tensor, whose `numel` is 40000",
        ),
        ((0, 40_001), "must be within"),
        ((BLOCK, 0), "must be within"),
        (
            (100, BLOCK),
            r"`begin` \(=100\) must be a multiple of 16384 or the end of the tensor \(40000\).*`spans`",
        ),
        ((0, 100), r"`end` \(=100\) must be a multiple of 16384"),
    ],
    ids=str,
)
def test_a_part_that_cuts_a_block_or_leaves_the_tensor_is_refused(span, message):
    with pytest.raises(ValueError, match=message):
        Part(numel=40_000, begin=span[0], end=span[1])
