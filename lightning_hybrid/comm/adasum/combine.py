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

from collections.abc import Callable, Iterator, Sequence
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
    """Replace `flat` (1-D, contiguous) by the Adasum of those of the group, tensor by tensor.

    Collective: every rank of the group must call it, in the same order; in place; afterwards all ranks hold the same
    bits. With N ranks each sends 2 (N - 1) / N of the bytes of `flat`, in 2 log2 N messages, and takes part in log2 N
    sums of inner products: 12 N bytes for each tensor in the first of them, half as many in each further one.

    Args:
        flat: fp16, bf16, fp32 or fp64; what each node has.
        numels: elements of each tensor in `flat`, in order. What follows them is summed: the checksum of a step.
        group: of a power of two of ranks, numbered as the tree combines them.
        sum_: sums a flat float64 tensor over a group, in place.
    """
    me = dist.get_rank(group)
    size = dist.get_world_size(group)
    bounds = [0, *accumulate(numels)]
    num_levels = size.bit_length() - 1
    own, begin, end = (
        flat,
        0,
        flat.numel(),
    )  # what this node has to combine: elements `begin` to `end` of the bucket
    halves: list[tuple[slice, slice]] = []
    for level in range(num_levels):
        partner = me ^ (1 << level)
        kept, given = _halves(begin, end, is_lower=me < partner)
        halves.append((kept, given))
        if own.dtype != flat.dtype:
            flat[given].copy_(
                own[given.start - begin : given.stop - begin]
            )  # rounded to the dtype of the messages
        own = own[kept.start - begin : kept.stop - begin].to(
            torch.promote_types(flat.dtype, torch.float32)
        )
        received = torch.empty_like(flat[kept])
        _swap(flat[given], received, partner, group)
        begin = kept.start
        end = kept.stop
        lower, upper = (own, received) if me < partner else (received, own)
        # A row for each set of nodes that combine theirs: one sum over all nodes serves them all, as 0 + x is exact.
        table = torch.zeros(
            size >> (level + 1), len(numels), 3, dtype=torch.float64, device=flat.device
        )
        products = table[me >> (level + 1)]
        segments = _segments(bounds, begin, end, flat.device) if _takes_segments(flat) else None
        if segments is not None:
            products.copy_(inner_products_of_segments(lower, upper, segments)[:-1])
        for index, part in _parts(bounds, begin, end) if segments is None else ():
            products[index] = inner_products(lower[part], upper[part])
        sum_(table.view(-1), group)
        factors = adasum_factors(products)
        if me > partner:
            factors = factors.flip(-1)
        if segments is not None:
            combine_segments_(own, received, factors, segments)
            continue
        for index, part in _parts(bounds, begin, end):
            own[part].mul_(factors[index, 0]).addcmul_(
                received[part].to(own.dtype), factors[index, 1]
            )
        tail = slice(max(begin, bounds[-1]) - begin, end - begin)
        own[tail].add_(received[tail])
    if own.dtype != flat.dtype:
        flat[begin:end].copy_(own)
    for level, (kept, given) in reversed(list(enumerate(halves))):
        _swap(flat[kept], flat[given], me ^ (1 << level), group)


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
    sums = [
        torch.segment_reduce(x * y, "sum", lengths=segments, unsafe=True)
        for x, y in ((a, a), (b, b), (a, b))
    ]
    return torch.stack(sums, -1)


def combine_segments_(own: Tensor, other: Tensor, factors: Tensor, segments: Tensor) -> None:
    """Combine the segments of two tensors in place of the first, by their factors (shape `[segments - 1, 2]`).

    The last segment is summed.
    """
    segment_factors = torch.nn.functional.pad(factors, (0, 0, 0, 1), value=1.0).to(own.dtype)
    own_factor, other_factor = torch.repeat_interleave(
        segment_factors, segments, dim=0, output_size=own.numel()
    ).unbind(-1)
    own.mul_(own_factor).addcmul_(other.to(own.dtype), other_factor)


def _segments(bounds: Sequence[int], begin: int, end: int, device: torch.device) -> Tensor:
    # The elements of each tensor between `begin` and `end`, and last of what follows them.
    ends = [min(max(bound, begin), end) for bound in (*bounds, end)]
    on_host = torch.tensor([high - low for low, high in pairwise(ends)])
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


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
    return (lower, upper) if is_lower else (upper, lower)


def _parts(bounds: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, slice]]:
    # Each tensor that has elements between `begin` and `end`, and where these are, counted from `begin`.
    for index, (first, last) in enumerate(pairwise(bounds)):
        low = max(first, begin)
        high = min(last, end)
        if low < high:
            yield index, slice(low - begin, high - begin)


def _swap(given: Tensor, taken: Tensor, partner: int, group: dist.ProcessGroup) -> None:
    # Sends one tensor to a rank of the group, and receives another from it. Of small tensors a half may be empty.
    messages = [
        (call, part) for call, part in ((dist.isend, given), (dist.irecv, taken)) if part.numel()
    ]
    operations = [
        dist.P2POp(call, part, group=group, group_peer=partner) for call, part in messages
    ]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def refuse_cut_bucket(bucket: BucketPlan, topology: Topology, dtype_across_nodes: object) -> None:
    """Check that a bucket can be combined by Adasum.

    Raises:
        ValueError: its plan sums over nodes otherwise than by their leaders, or cuts it: inner products are of whole
            parameters; or it is to travel between nodes in another dtype.
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
        ValueError: their number is no power of two, or they hold different numbers of ranks, whose means would
            count the same.
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
