"""Adasum between nodes, which averages parallel gradients and adds orthogonal gradients.

    a (+) b = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b          a factor is 1 if its norm is 0

a and b are two nodes' gradients of one parameter. More nodes are combined in a binary tree, ((0 + 1) + (2 + 3)) + ...
The tree is computed by recursive vector halving. On four nodes:

    0 <-> 1, 2 <-> 3    each node sends the half that its partner keeps; inner products are summed over both; combine
    0 <-> 2, 1 <-> 3    the same with quarters, inner products summed over all four
    0 <-> 2, 1 <-> 3    quarters are gathered to halves
    0 <-> 1, 2 <-> 3    halves are gathered to the whole

Each element is computed on one node and copied to the other nodes, so the result is bitwise equal on all nodes.
Messages have the tensor's own dtype. Between messages, nodes compute in at least fp32. Inner products are computed in
float64, where squares of fp32 values cannot overflow. The result is homogeneous of degree 1, so it keeps the loss scale
of the gradients. If a gradient contains inf or nan, an inner product is nan, and the whole parameter becomes nan on
every node.

Source: Maleki et al. 2020 (arXiv:2006.02924).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.bucket_sizes import ALIGNMENT
from lightning_hybrid.comm.plan import BucketPlan
from lightning_hybrid.comm.topology import Topology

# Number of elements that are converted to float64 at a time. Blocks that fit in the cache take less time.
BLOCK_NUMEL = 2**17


def adasum_(
    flat: Tensor,
    numels: Sequence[int],
    group: dist.ProcessGroup,
    *,
    sum_: Callable[[Tensor, dist.ProcessGroup], None],
) -> None:
    """Replace `flat` with its Adasum over the process group, computed separately for each parameter.

    `flat` must be 1-D and contiguous.

    Collective: every rank of the group must call it, in the same order. Afterwards `flat` is bitwise equal on all
    ranks. With N ranks, each rank sends 2 (N - 1) / N of the bytes of `flat` in 2 log2 N messages. It also takes part
    in log2 N all-reduces of inner products. The first of these has 12 N bytes per tensor, and the size is halved each
    time.

    Args:
        flat: Gradients of this node, in fp16, bf16, fp32 or fp64.
        numels: Number of elements of each tensor in `flat`, in order. Elements after them, such as the checksum of a
            step, are summed.
        group: Process group whose size is a power of two. Its ranks are numbered in the order of the tree.
        sum_: Function that all-reduces a flat float64 tensor over a group, in place.
    """
    combination = _Combination(flat, numels, group, sum_)
    num_ranks = dist.get_world_size(group)
    num_levels = num_ranks.bit_length() - 1  # log2 of a power of two
    for level in range(num_levels):
        combination.combine_level(level)
    combination.write_back()
    for level in reversed(range(num_levels)):
        combination.gather_level(level)


@dataclass(frozen=True)
class _Halves:
    """Halves of a range of the bucket that two partner nodes combine.

    Attributes:
        kept: Elements that this node combines.
        sent: Elements that the partner combines.
    """

    kept: slice
    sent: slice


@dataclass(frozen=True)
class _Part:
    """Part of one tensor that is in the range that a node combines.

    Attributes:
        tensor: Index of the tensor in the bucket.
        elements: Elements of the part, relative to the start of the range.
    """

    tensor: int
    elements: slice


class _Combination:
    """Adasum computation of one bucket on one node.

    The node combines a range of the bucket's elements, which is halved at each level of the tree.

    Args:
        flat, numels, group, sum_: Arguments of `adasum_`.
    """

    def __init__(
        self,
        flat: Tensor,
        numels: Sequence[int],
        group: dist.ProcessGroup,
        sum_: Callable[[Tensor, dist.ProcessGroup], None],
    ) -> None:
        self._flat = flat
        self._bounds = [0, *accumulate(numels)]  # first element of each tensor, and the last end
        self._group = group
        self._sum_ = sum_
        self._rank = dist.get_rank(group)
        self._num_ranks = dist.get_world_size(group)
        self._values = flat  # values of this node's range, in at least fp32 after the first level
        self._range = slice(0, flat.numel())
        self._halves: list[_Halves] = []  # at each level

    def combine_level(self, level: int) -> None:
        """Exchange halves of the bucket with the partner node, and combine the half that this node keeps."""
        partner = self._partner(level)
        received = self._swap_halves(partner)
        segments = None
        if _takes_segments(self._flat):
            segments = _segments(self._bounds, self._range, self._flat.device)

        products = self._inner_products(level, partner, received, segments)
        factors = adasum_factors(products)
        if self._rank > partner:
            # The factors are in the order of the ranks. From here on, this node's own factor is first.
            factors = factors.flip(-1)

        if segments is not None:
            combine_segments_(self._values, received, factors, segments)
            return
        _combine_parts_(self._values, received, factors, self._parts())
        # Elements after the last tensor are summed.
        tail_begin = max(self._bounds[-1] - self._range.start, 0)
        self._values[tail_begin:].add_(received[tail_begin:])

    def write_back(self) -> None:
        """Write the values that this node has combined back into the bucket."""
        # Values of the same dtype are a view of the bucket, and need no copy.
        if self._values.dtype != self._flat.dtype:
            self._flat[self._range].copy_(self._values)

    def gather_level(self, level: int) -> None:
        """Exchange the combined halves with the partner node of a tree level."""
        halves = self._halves[level]
        combined_here = self._flat[halves.kept]
        combined_there = self._flat[halves.sent]
        _swap(combined_here, combined_there, self._partner(level), self._group)

    def _partner(self, level: int) -> int:
        # The ranks of partners differ in one bit.
        return self._rank ^ (1 << level)

    def _swap_halves(self, partner: int) -> Tensor:
        """Send one half to the partner, and return the partner's values of the half that this node keeps."""
        flat = self._flat
        halves = _halves(self._range, is_lower=self._rank < partner)
        self._halves.append(halves)

        if self._values.dtype != flat.dtype:
            # Messages have the tensor's own dtype.
            flat[halves.sent].copy_(self._values_in(halves.sent))
        received = torch.empty_like(flat[halves.kept])
        _swap(flat[halves.sent], received, partner, self._group)

        compute_dtype = torch.promote_types(flat.dtype, torch.float32)
        self._values = self._values_in(halves.kept).to(compute_dtype)
        self._range = halves.kept
        return received

    def _values_in(self, elements: slice) -> Tensor:
        """Return the values of some elements of the bucket, which must be in this node's range."""
        begin = elements.start - self._range.start
        end = elements.stop - self._range.start
        return self._values[begin:end]

    def _inner_products(
        self, level: int, partner: int, received: Tensor, segments: Tensor | None
    ) -> Tensor:
        """Return |a|^2, |b|^2 and a.b of each tensor, summed over the nodes that a tree level combines."""
        # 2^(level + 1) consecutive nodes form a set that combines its tensors at this level. Every set has a row. One
        # sum over all nodes is enough for all sets, because 0 + x is exact.
        num_sets = self._num_ranks >> (level + 1)
        set_index = self._rank >> (level + 1)
        num_tensors = len(self._bounds) - 1
        shape = (num_sets, num_tensors, 3)
        table = torch.zeros(shape, dtype=torch.float64, device=self._flat.device)
        products = table[set_index]

        if self._rank < partner:
            _write_products_(products, self._values, received, segments, self._parts())
        else:
            _write_products_(products, received, self._values, segments, self._parts())
        self._sum_(table.view(-1), self._group)
        return products

    def _parts(self) -> Iterator[_Part]:
        return _parts(self._bounds, self._range)


def _write_products_(
    products: Tensor,
    a: Tensor,
    b: Tensor,
    segments: Tensor | None,
    parts: Iterable[_Part],
) -> None:
    """Write |a|^2, |b|^2 and a.b of each tensor into `products`.

    `a` and `b` hold the values of the node with the lower rank and of the node with the higher rank.
    """
    if segments is not None:
        products_of_segments = inner_products_of_segments(a, b, segments)
        products.copy_(products_of_segments[:-1])  # the last segment follows the last tensor
        return
    for part in parts:
        products[part.tensor] = inner_products(a[part.elements], b[part.elements])


def _combine_parts_(
    values: Tensor, received: Tensor, factors: Tensor, parts: Iterable[_Part]
) -> None:
    """Combine two nodes' values of each tensor with the Adasum factors, and write them into `values`."""
    for part in parts:
        own_factor = factors[part.tensor, 0]
        received_factor = factors[part.tensor, 1]
        own_values = values[part.elements]
        own_values.mul_(own_factor)
        received_values = received[part.elements].to(values.dtype)
        own_values.addcmul_(received_values, received_factor)


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return |a|^2, |b|^2 and a.b of two flat tensors, in float64."""
    total = torch.zeros(3, dtype=torch.float64, device=a.device)
    for a_block, b_block in zip(a.split(BLOCK_NUMEL), b.split(BLOCK_NUMEL), strict=True):
        total += _inner_products_of_block(a_block, b_block)
    return total


def _inner_products_of_block(a: Tensor, b: Tensor) -> Tensor:
    a = a.double()
    b = b.double()
    a_square = a.dot(a)
    b_square = b.dot(b)
    dot = a.dot(b)
    return torch.stack([a_square, b_square, dot])


def inner_products_of_segments(a: Tensor, b: Tensor, segments: Tensor) -> Tensor:
    """Return |a|^2, |b|^2 and a.b of each segment of two flat tensors, in float64.

    The number of kernels does not depend on the number of segments.

    Args:
        a: Flat tensor of one node.
        b: Flat tensor of the other node.
        segments: Length of each segment.
    """
    a = a.double()
    b = b.double()
    # The products are summed one after the other, because each takes as much memory as the bucket.
    a_square = _sum_segments(a * a, segments)
    b_square = _sum_segments(b * b, segments)
    dot = _sum_segments(a * b, segments)
    return torch.stack([a_square, b_square, dot], -1)


def _sum_segments(values: Tensor, segments: Tensor) -> Tensor:
    # With `unsafe=True` the host does not read the lengths back to check their sum.
    return torch.segment_reduce(values, "sum", lengths=segments, unsafe=True)


def combine_segments_(values: Tensor, received: Tensor, factors: Tensor, segments: Tensor) -> None:
    """Combine two tensors segment by segment with Adasum factors, and write the result into `values`.

    The last segment is summed without factors.

    Args:
        values: Flat tensor of this node.
        received: Flat tensor of the other node.
        factors: Factors of both tensors for each segment except the last, of shape `[segments - 1, 2]`.
        segments: Length of each segment.
    """
    one_row_below = (0, 0, 0, 1)
    with_tail = torch.nn.functional.pad(factors, one_row_below, value=1.0)
    segment_factors = with_tail.to(values.dtype)
    element_factors = torch.repeat_interleave(
        segment_factors, segments, dim=0, output_size=values.numel()
    )
    own_factor, received_factor = element_factors.unbind(-1)
    values.mul_(own_factor)
    values.addcmul_(received.to(values.dtype), received_factor)


def _segments(bounds: Sequence[int], elements: slice, device: torch.device) -> Tensor:
    """Return the number of elements in a range, for each tensor and for the end of the bucket after the last tensor."""
    bounds_in_range = []
    for bound in (*bounds, elements.stop):
        not_below = max(bound, elements.start)
        bounds_in_range.append(min(not_below, elements.stop))
    lengths = [high - low for low, high in pairwise(bounds_in_range)]
    segments = torch.tensor(lengths)
    if device.type == "cuda":
        segments = segments.pin_memory().to(device, non_blocking=True)
    return segments


def _takes_segments(flat: Tensor) -> bool:
    # On a CPU it is faster to combine one tensor after the other, in blocks that stay in the cache.
    return flat.is_cuda


def adasum_factors(products: Tensor) -> Tensor:
    """Return the Adasum factors of a and b, given the inner products |a|^2, |b|^2 and a.b.

    The shape of `products` is `[..., 3]`, and the shape of the result is `[..., 2]`.

    >>> adasum_factors(torch.tensor([[4.0, 1.0, 0.0], [4.0, 4.0, 4.0], [4.0, 0.0, 0.0]]))    # orthogonal, equal, b = 0
    tensor([[1.0000, 1.0000],
            [0.5000, 0.5000],
            [1.0000, 1.0000]])
    """
    squares = products[..., :2]
    dot = products[..., 2:]
    factors = 1 - dot / (2 * squares)
    return torch.where(squares == 0, 1.0, factors)


def _halves(elements: slice, *, is_lower: bool) -> _Halves:
    """Split a range into the half that this node keeps and the half that it sends to its partner."""
    # The lower half is rounded up to complete units of alignment, and may be the whole range.
    numel = elements.stop - elements.start
    num_units = -(-numel // (2 * ALIGNMENT))
    middle = min(elements.start + num_units * ALIGNMENT, elements.stop)
    lower = slice(elements.start, middle)
    upper = slice(middle, elements.stop)
    if is_lower:
        return _Halves(kept=lower, sent=upper)
    return _Halves(kept=upper, sent=lower)


def _parts(bounds: Sequence[int], elements: slice) -> Iterator[_Part]:
    """Yield the part of each tensor that is in a range."""
    for tensor, (tensor_begin, tensor_end) in enumerate(pairwise(bounds)):
        begin = max(tensor_begin, elements.start)
        end = min(tensor_end, elements.stop)
        if begin < end:
            yield _Part(tensor, slice(begin - elements.start, end - elements.start))


def _swap(sent: Tensor, received: Tensor, partner: int, group: dist.ProcessGroup) -> None:
    """Send a tensor to the partner rank and receive a tensor from it at the same time.

    Either tensor may be empty, because halves of small tensors are.
    """
    operations = []
    if sent.numel():
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=partner))
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=partner))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def check_adasum_bucket(bucket: BucketPlan, topology: Topology, dtype_across_nodes: object) -> None:
    """Raise if Adasum does not support the plan of a bucket or the topology.

    Raises:
        ValueError: The plan does not sum over the leaders of nodes, splits the bucket into chunks, or uses another
            dtype between nodes.
    """
    refuse_odd_nodes(topology)
    if (
        bucket.algorithm != "hierarchical"
        or bucket.num_chunks != 1
        or dtype_across_nodes is not None
    ):
        raise ValueError(
            f"Bucket {bucket.index} (algorithm {bucket.algorithm!r}, {bucket.num_chunks} chunks, dtype between nodes "
            f"{dtype_across_nodes}) does not suit Adasum, which needs the algorithm 'hierarchical', one chunk and no "
            "other dtype between nodes, because node leaders combine whole parameters. Use "
            "HybridAllReduceStrategy(between_nodes=Adasum()), or CommPlan(algorithm='hierarchical', "
            "chunk_bytes=2**50)."
        )


def refuse_odd_nodes(topology: Topology) -> None:
    """Raise if the nodes cannot form Adasum's balanced binary tree.

    The check needs no process group.

    Raises:
        ValueError: The number of nodes is not a power of two, or nodes have different numbers of ranks. The averages of
            nodes of different sizes would have equal weight.
    """
    num_nodes = topology.num_nodes
    is_power_of_two = num_nodes & (num_nodes - 1) == 0
    if not is_power_of_two:
        below = 1 << (num_nodes.bit_length() - 1)
        raise ValueError(
            "`between_nodes` (=Adasum()) requires that the number of nodes is a power of two, because Adasum combines "
            f"nodes in pairs, but the run has {num_nodes} nodes. Launch {below} or {2 * below} nodes, or set "
            "between_nodes=Mean()."
        )
    if topology.ranks_per_node is None:
        sizes = [len(node) for node in topology.nodes]
        raise ValueError(
            "`between_nodes` (=Adasum()) requires the same number of ranks on every node, but the nodes have "
            f"{sizes} ranks. Otherwise the average of a small node would count as much as that of a large node. "
            "Launch the same number of ranks on every node, or set between_nodes=Mean()."
        )
