"""Adasum of a bucket over nodes: tensors that agree are averaged, tensors that are orthogonal are added.

    a (+) b = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b          a factor is 1 where its norm is 0

a, b: gradients of one parameter; of more than two nodes in a binary tree, ((0 + 1) + (2 + 3)) + ... By recursive vector
halving, on four nodes:

    0 <-> 1, 2 <-> 3    a node sends the half that the other one keeps; inner products are summed over both; combine
    0 <-> 2, 1 <-> 3    the same with quarters, inner products summed over all four
    0 <-> 2, 1 <-> 3    quarters are gathered to halves
    0 <-> 1, 2 <-> 3    halves are gathered to the whole

Each element is computed on one node and copied to the others, so all hold the same bits. Messages have the tensor's own
dtype; between them a node keeps at least fp32, and inner products are in float64, whose range no square of fp32 leaves.
The result is homogeneous of degree 1, so a loss scale passes through. inf and nan survive: with either an inner product
is nan, and then so is the whole parameter, on every node.

Source: Maleki et al. 2020 (arXiv:2006.02924).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.bucket_layout import ALIGNMENT
from lightning_hybrid.comm.plan import BucketPlan
from lightning_hybrid.comm.topology import Topology

# Inner products convert so many elements at a time to float64: what does not stay in the cache takes longer.
BLOCK_NUMEL = 2**17


def adasum_(
    flat: Tensor,
    numels: Sequence[int],
    group: dist.ProcessGroup,
    *,
    sum_: Callable[[Tensor, dist.ProcessGroup], None],
) -> None:
    """Replace `flat` (1-D, contiguous) by the Adasum of the group's tensors, parameter by parameter, in place.

    Collective: every rank of the group must call it, in the same order. Afterwards all ranks hold
    the same bits. With N ranks each sends 2 (N - 1) / N of the bytes of `flat`, in 2 log2 N
    messages, and takes part in log2 N sums of inner products: 12 N bytes for each tensor in the
    first sum, half as many in each further one.

    Args:
        flat: The gradients of this node, in fp16, bf16, fp32 or fp64.
        numels: Elements of each tensor in `flat`, in order. What follows them, such as the checksum
            of a step, is summed.
        group: A power of two of ranks, numbered as the tree combines them.
        sum_: Function that sums a flat float64 tensor over a group, in place.
    """
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    bounds = [0, *accumulate(numels)]
    num_levels = num_ranks.bit_length() - 1

    # This node combines `values`, the elements `begin` to `end` of the bucket. Each level halves them.
    values = flat
    begin = 0
    end = flat.numel()
    halves: list[tuple[slice, slice]] = []
    for level in range(num_levels):
        partner = rank ^ (1 << level)
        kept, sent = _halves(begin, end, is_lower=rank < partner)
        halves.append((kept, sent))
        if values.dtype != flat.dtype:
            # Messages have the tensor's own dtype.
            flat[sent].copy_(values[sent.start - begin : sent.stop - begin])
        received = torch.empty_like(flat[kept])
        _swap(flat[sent], received, partner, group)

        kept_values = values[kept.start - begin : kept.stop - begin]
        values = kept_values.to(torch.promote_types(flat.dtype, torch.float32))
        begin = kept.start
        end = kept.stop

        # Every set of nodes that combines its tensors has a row. One sum over all nodes serves them
        # all, because 0 + x is exact.
        num_sets = num_ranks >> (level + 1)
        table_shape = (num_sets, len(numels), 3)
        table = torch.zeros(table_shape, dtype=torch.float64, device=flat.device)
        products = table[rank >> (level + 1)]
        segments = None
        if _takes_segments(flat):
            segments = _segments(bounds, begin, end, flat.device)
        lower = values
        upper = received
        if rank > partner:
            lower = received
            upper = values
        _write_products_(products, lower, upper, segments, _parts(bounds, begin, end))
        sum_(table.view(-1), group)

        factors = adasum_factors(products)
        if rank > partner:
            factors = factors.flip(-1)
        if segments is not None:
            combine_segments_(values, received, factors, segments)
        else:
            _combine_parts_(values, received, factors, _parts(bounds, begin, end))
            tail = slice(max(begin, bounds[-1]) - begin, end - begin)
            values[tail].add_(received[tail])

    if values.dtype != flat.dtype:
        flat[begin:end].copy_(values)
    for level in reversed(range(num_levels)):
        kept, sent = halves[level]
        _swap(flat[kept], flat[sent], rank ^ (1 << level), group)


def _write_products_(
    products: Tensor,
    lower: Tensor,
    upper: Tensor,
    segments: Tensor | None,
    parts: Iterable[tuple[int, slice]],
) -> None:
    """Write the inner products of each tensor, of the lower node's values and the upper node's."""
    if segments is not None:
        products.copy_(inner_products_of_segments(lower, upper, segments)[:-1])
        return
    for index, part in parts:
        products[index] = inner_products(lower[part], upper[part])


def _combine_parts_(
    values: Tensor, received: Tensor, factors: Tensor, parts: Iterable[tuple[int, slice]]
) -> None:
    """Combine two nodes' values of each tensor, in place of the first."""
    for index, part in parts:
        values[part].mul_(factors[index, 0])
        values[part].addcmul_(received[part].to(values.dtype), factors[index, 1])


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return |a|^2, |b|^2 and a.b of two flat tensors, in float64."""
    total = torch.zeros(3, dtype=torch.float64, device=a.device)
    for x, y in zip(a.split(BLOCK_NUMEL), b.split(BLOCK_NUMEL), strict=True):
        x = x.double()
        y = y.double()
        total += torch.stack([x.dot(x), y.dot(y), x.dot(y)])
    return total


def inner_products_of_segments(a: Tensor, b: Tensor, segments: Tensor) -> Tensor:
    """Return `inner_products` of each segment, by as many kernels whatever their number. `segments`: their lengths."""
    a = a.double()
    b = b.double()
    # `unsafe`: else the host would read the lengths back to check their sum.
    sums = []
    for x, y in ((a, a), (b, b), (a, b)):  # one product at a time: each is a float64 bucket
        sums.append(torch.segment_reduce(x * y, "sum", lengths=segments, unsafe=True))
    return torch.stack(sums, -1)


def combine_segments_(values: Tensor, received: Tensor, factors: Tensor, segments: Tensor) -> None:
    """Combine the segments of two tensors in place of the first, by their factors (shape `[segments - 1, 2]`).

    The last segment is summed.
    """
    segment_factors = torch.nn.functional.pad(factors, (0, 0, 0, 1), value=1.0).to(values.dtype)
    element_factors = torch.repeat_interleave(
        segment_factors, segments, dim=0, output_size=values.numel()
    )
    own_factor, received_factor = element_factors.unbind(-1)
    values.mul_(own_factor)
    values.addcmul_(received.to(values.dtype), received_factor)


def _segments(bounds: Sequence[int], begin: int, end: int, device: torch.device) -> Tensor:
    # The elements of each tensor between `begin` and `end`, and last of what follows them.
    ends = [min(max(bound, begin), end) for bound in (*bounds, end)]
    lengths = torch.tensor([high - low for low, high in pairwise(ends)])
    if device.type == "cuda":
        lengths = lengths.pin_memory().to(device, non_blocking=True)
    return lengths


def _takes_segments(flat: Tensor) -> bool:
    # On a CPU one tensor after the other, in blocks that stay in the cache, is faster.
    return flat.is_cuda


def adasum_factors(products: Tensor) -> Tensor:
    """Return the factors of a and of b (shape `[..., 2]`) from |a|^2, |b|^2 and a.b (shape `[..., 3]`).

    >>> adasum_factors(torch.tensor([[4.0, 1.0, 0.0], [4.0, 4.0, 4.0], [4.0, 0.0, 0.0]]))    # orthogonal, equal, b = 0
    tensor([[1.0000, 1.0000],
            [0.5000, 0.5000],
            [1.0000, 1.0000]])
    """
    squares = products[..., :2]
    dot = products[..., 2:]
    return torch.where(squares == 0, 1.0, 1 - dot / (2 * squares))


def _halves(begin: int, end: int, *, is_lower: bool) -> tuple[slice, slice]:
    # What the lower and the upper node of a pair keep, seen from one of them: its own first.
    middle = min(end, begin + -(-(end - begin) // (2 * ALIGNMENT)) * ALIGNMENT)
    lower = slice(begin, middle)
    upper = slice(middle, end)
    if is_lower:
        return lower, upper
    return upper, lower


def _parts(bounds: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, slice]]:
    # Each tensor that has elements between `begin` and `end`, and where these are, counted from `begin`.
    for index, (first, last) in enumerate(pairwise(bounds)):
        low = max(first, begin)
        high = min(last, end)
        if low < high:
            yield index, slice(low - begin, high - begin)


def _swap(sent: Tensor, received: Tensor, partner: int, group: dist.ProcessGroup) -> None:
    """Send a tensor to a rank of the group, and receive one from it. Halves of small tensors may be empty."""
    operations = []
    if sent.numel():
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=partner))
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=partner))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def refuse_cut_bucket(bucket: BucketPlan, topology: Topology, dtype_across_nodes: object) -> None:
    """Check that a bucket can be combined by Adasum.

    Raises:
        ValueError: The plan does not sum over the leaders of nodes, cuts the bucket although inner products are of
            whole parameters, or sends it between nodes in another dtype.
    """
    refuse_odd_nodes(topology)
    if (
        bucket.algorithm != "hierarchical"
        or bucket.num_chunks != 1
        or dtype_across_nodes is not None
    ):
        raise ValueError(
            f"bucket {bucket.index} (={bucket.algorithm!r} in {bucket.num_chunks} chunks, in {dtype_across_nodes} "
            "between nodes) must be 'hierarchical' in one chunk and in its own dtype for Adasum: the leaders of the "
            "nodes combine whole parameters. Take the plan of `HybridAllReduceStrategy(between_nodes=Adasum())`, or "
            "CommPlan(algorithm='hierarchical', chunk_bytes=2**50)."
        )


def refuse_odd_nodes(topology: Topology) -> None:
    """Check that Adasum's binary tree fits the nodes. Needs no process group.

    Raises:
        ValueError: The number of nodes is not a power of two, or nodes hold different numbers of ranks, whose means
            would have equal weight.
    """
    num_nodes = topology.num_nodes
    sizes = [len(node) for node in topology.nodes]
    if num_nodes & (num_nodes - 1):
        below = 1 << (num_nodes.bit_length() - 1)
        raise ValueError(
            f"`between_nodes` (=Adasum()) needs a power of two of nodes, and there are {num_nodes}: its tree combines "
            f"them two by two. Launch {below} or {2 * below} nodes, or write between_nodes=Mean()."
        )
    if topology.ranks_per_node is None:
        raise ValueError(
            f"`between_nodes` (=Adasum()) needs nodes of equal size, and these hold {sizes} ranks: the mean of a small "
            "node would count as much as that of a large one. Launch equal nodes, or write between_nodes=Mean()."
        )
