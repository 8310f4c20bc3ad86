"""Point-to-point exchange of embeddings between ranks, and reductions in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Branch(Generic[Value]):
    """Sum of `2**level` consecutive terms."""

    level: int
    total: Value


class TreeSum(Generic[Value]):
    """Running sum that adds terms in the order of a binary tree, for reproducible rounding.

    The sum of 2^k terms is `((x0 + x1) + (x2 + x3)) + ...`. It is bit-identical whether one rank
    adds all terms, or several ranks each add 2^j consecutive terms and then add their partial sums.
    At most one partial sum per level is in memory.

    Args:
        add: Function that adds two values. It must be commutative bit for bit.

    >>> tree = TreeSum(lambda a, b: f"({a}+{b})")
    >>> for term in "abcd":
    ...     tree.push(term)
    >>> tree.total()
    '((a+b)+(c+d))'
    """

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self._branches: list[_Branch[Value]] = []  # in descending order of levels

    @property
    def is_empty(self) -> bool:
        """True if no term has been added yet."""
        return not self._branches

    def push(self, term: Value) -> None:
        """Add a term to the sum."""
        level = 0
        while self._branches and self._branches[-1].level == level:
            branch = self._branches.pop()
            term = self._add(branch.total, term)
            level += 1
        self._branches.append(_Branch(level, term))

    def total(self) -> Value:
        """Return the sum of all terms, after at least one term was added."""
        *larger_branches, smallest_branch = self._branches
        total = smallest_branch.total
        for branch in reversed(larger_branches):
            total = self._add(branch.total, total)
        return total


def tree_sums(count: int) -> list[TreeSum[Tensor]]:
    """Create `count` empty `TreeSum` objects for tensors."""
    return [TreeSum[Tensor](torch.add) for _ in range(count)]


def tree_sum(terms: Iterable[Tensor]) -> Tensor:
    """Sum tensors pairwise, in the order of a binary tree."""
    tree = TreeSum[Tensor](torch.add)
    for term in terms:
        tree.push(term)
    return tree.total()


class Peers:
    """Ranks that share a global batch, connected by their own process group.

    Without distributed training, there is one rank and no group. If the number of ranks is a power
    of two, a rank exchanges tensors with `rank XOR k` in round k. Sums over rounds by `TreeSum` are
    then bit-identical on all ranks, and on 1, 2, 4, ... ranks. With other numbers of ranks, a rank
    sends to `rank + k`, and sums may differ in their last bits.

    Args:
        world: The default process group, or None.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.rank = 0
        self.size = 1
        self._group: Any = None
        if world is not None:
            # Use a separate group, because another thread may all-reduce gradients in the default group at any time.
            self._group = dist.new_group(timeout=_timeout_of(world), group_desc="contrastive")
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()

    @property
    def is_power_of_two(self) -> bool:
        """True if the number of ranks is a power of two.

        If it is, sums over ranks are bit-identical to those on one rank.
        """
        return self.size & (self.size - 1) == 0

    def check_same(self, sizes: Sequence[int], *, device: torch.device) -> None:
        """Raise `ValueError` if the ranks' embeddings have different shapes.

        Collective: every rank must call it, in the same order.

        Raises:
            ValueError: Shapes differ. The error is raised on every rank, with the same message.
        """
        if self.size == 1:
            return
        sizes_here = torch.tensor(sizes, device=device)
        sizes_by_rank = [torch.empty_like(sizes_here) for _ in range(self.size)]
        dist.all_gather(sizes_by_rank, sizes_here, group=self._group)
        if all(torch.equal(sizes_there, sizes_here) for sizes_there in sizes_by_rank):
            return

        shape_by_rank = []
        for sizes_there in sizes_by_rank:
            shape = "x".join(str(size) for size in sizes_there.tolist())
            shape_by_rank.append(shape)
        shapes = ", ".join(shape_by_rank)
        raise ValueError(
            "The embeddings of all ranks must have the same shape, because every rank contributes the same number of "
            f"pairs to the global batch, but their shapes are {shapes}. Set drop_last=True in the loader."
        )

    def rounds(self, tensors: Sequence[Tensor]) -> Iterator[tuple[bool, tuple[Tensor, ...]]]:
        """Yield every rank's tensors in turn, with a flag that is True for this rank's own tensors.

        This rank's tensors come first. While the caller processes one round, the tensors of the
        next round are in transit. A rank sends (size - 1) times the bytes of `tensors`. The yielded
        tensors are overwritten two rounds later.

        Collective: every rank must call it, in the same order.
        """
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        if self.size == 1:
            yield True, tensors
            return

        # One buffer holds the round that the caller processes, and the other one the next round.
        buffers = []
        for _ in range(min(2, self.size - 1)):
            buffer = tuple(torch.empty_like(tensor) for tensor in tensors)
            buffers.append(buffer)

        arriving = buffers[0]
        requests = self._exchange(1, tensors, arriving)
        yield True, tensors
        for k in range(1, self.size):
            for request in requests:
                request.wait()
            arrived = arriving
            if k + 1 < self.size:
                arriving = buffers[k % 2]
                requests = self._exchange(k + 1, tensors, arriving)
            yield False, arrived

    def _exchange(self, k: int, tensors: Sequence[Tensor], received: Sequence[Tensor]) -> list[Any]:
        """Start sending tensors to this rank's destination in round k, and receiving from its source."""
        if self.is_power_of_two:
            destination = self.rank ^ k
            source = destination
        else:
            destination = (self.rank + k) % self.size
            source = (self.rank - k) % self.size

        operations = []
        for tag, tensor in enumerate(tensors):
            operations.append(dist.P2POp(dist.isend, tensor, destination, self._group, tag=tag))
        for tag, tensor in enumerate(received):
            operations.append(dist.P2POp(dist.irecv, tensor, source, self._group, tag=tag))
        return dist.batch_isend_irecv(operations)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, bit-identical on every rank.

        On 2^k ranks, the order of additions is that of `TreeSum`.

        Collective: every rank must call it, in the same order.
        """
        total = tensor.clone()
        if not self.is_power_of_two:
            dist.all_reduce(total, group=self._group)
            return total
        received = torch.empty_like(total)
        distance = 1
        while distance < self.size:
            requests = self._exchange(distance, [total], [received])
            for request in requests:
                request.wait()
            total = total + received
            distance *= 2
        return total


def _timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a process group, because `dist.new_group` does not inherit it.

    If the limit is unknown, the result is None, for which torch uses its default limit.
    """
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
