"""Losses over the pairs of all ranks: blocks that every rank shows every other, and sums by a fixed tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.checks import require_whole

Value = TypeVar("Value")


class TreeSum(Generic[Value]):
    """The sum of a sequence by a binary tree, of which only one branch for each level is kept.

    Of 2^k terms it is `((x0 + x1) + (x2 + x3)) + ...`: the same bits whether one rank adds all of them, or several add
    2^j neighbours each and then their sums. `add` must be commutative to the bit.

    >>> tree = TreeSum(lambda a, b: f"({a}+{b})")
    >>> for term in "abcd":
    ...     tree.push(term)
    >>> tree.total()
    '((a+b)+(c+d))'
    """

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self._branches: list[tuple[int, Value]] = []  # level, sum; levels fall

    @property
    def is_begun(self) -> bool:
        """Whether there is a term."""
        return bool(self._branches)

    def push(self, term: Value) -> None:
        """Add a term."""
        level = 0
        while self._branches and self._branches[-1][0] == level:
            term = self._add(self._branches.pop()[1], term)
            level += 1
        self._branches.append((level, term))

    def total(self) -> Value:
        """Return the sum of one term or more."""
        total = self._branches[-1][1]
        for _, branch in reversed(self._branches[:-1]):
            total = self._add(branch, total)
        return total


class Peers:
    """The ranks whose batches make the global one, in a group of their own; one rank alone where there is none.

    In round k a rank meets `rank XOR k`, where the number of ranks is a power of two: a sum over rounds by `TreeSum`
    then has the same bits on all ranks, and on 1, 2, 4, ... ranks. Else it meets `rank + k`, and has not.
    """

    def __init__(self, world: Any) -> None:
        self.of = world
        # Of their own: another thread may have sums of gradients under way in the default group, in any order.
        self._group: Any = None if self.of is None else dist.new_group(group_desc="contrastive")
        self.rank, self.size = (0, 1) if self.of is None else (dist.get_rank(), dist.get_world_size())

    @property
    def is_power_of_two(self) -> bool:
        """Whether bits are those of one rank."""
        return self.size & (self.size - 1) == 0

    def check_same(self, sizes: Sequence[int], *, device: torch.device) -> None:
        """Refuse other shapes on other ranks. Collective.

        Raises:
            ValueError: On every rank, with the same words.
        """
        own = torch.tensor(sizes, device=device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(found, own, group=self._group)
            if any(not torch.equal(one, own) for one in found):
                shapes = ", ".join("x".join(map(str, one.tolist())) for one in found)
                raise ValueError(
                    f"the embeddings of all ranks must have one shape, and have {shapes}: the global batch is made of "
                    "equal shares. Set drop_last=True in the loader."
                )

    def rounds(self, own: Sequence[Tensor]) -> Iterator[tuple[bool, tuple[Tensor, ...]]]:
        """Yield each rank's tensors, this one's first, and whether they are this one's. Collective.

        One round is on its way while the one before is worked on; (size - 1) x bytes of `own` are sent. What is
        yielded is written over two rounds later.
        """
        own = tuple(one.contiguous() for one in own)
        buffers = [tuple(map(torch.empty_like, own)) for _ in range(min(2, self.size - 1))]
        coming = self._meet(1, own, buffers[0]) if self.size > 1 else []
        yield True, own
        for k in range(1, self.size):
            for work in coming:
                work.wait()
            if k + 1 < self.size:
                coming = self._meet(k + 1, own, buffers[k % 2])
            yield False, buffers[(k - 1) % 2]

    def _meet(self, k: int, own: Sequence[Tensor], into: Sequence[Tensor]) -> list[Any]:
        to = self.rank ^ k if self.is_power_of_two else (self.rank + k) % self.size
        source = self.rank ^ k if self.is_power_of_two else (self.rank - k) % self.size
        operations = [dist.P2POp(dist.isend, one, to, self._group, tag=i) for i, one in enumerate(own)]
        operations += [dist.P2POp(dist.irecv, one, source, self._group, tag=i) for i, one in enumerate(into)]
        return dist.batch_isend_irecv(operations)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over ranks, the same bits on all; on 2^k ranks by the tree of `TreeSum`. Collective."""
        total = own.clone()
        if not self.is_power_of_two:
            dist.all_reduce(total, group=self._group)
            return total
        theirs, k = torch.empty_like(total), 1
        while k < self.size:
            for work in self._meet(k, [total], [theirs]):
                work.wait()
            total = total + theirs
            k *= 2
        return total


class PairLoss(nn.Module):
    """A loss of two views `"pairs features"`: row i of one belongs to row i of the other.

    Every rank must call it, with as many pairs. Computed in fp32, or in fp64 where that is given.

    Args:
        block: rows of a block; memory grows with its square, and bits are those of this block.

    Raises:
        ValueError: in forward: the views differ in shape, are no matrices, or have other shapes on other ranks.
    """

    couples_the_batch: bool = True  # gradients of losses of its parts do not add up to that of the batch

    def __init__(self, *, block: int = 256) -> None:
        super().__init__()
        require_whole("block", block, "rows of a block of pairs")
        self.block = block
        self._peers: Peers | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_peers": None}  # a group of processes is of this run alone

    def peers(self) -> Peers:
        """Return the ranks of the run. Collective at its first call, and at the first of another run."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._peers is None or self._peers.of is not world:
            self._peers = Peers(world)
        return self._peers

    def checked(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return both views in fp32 or fp64, once it is sure that all ranks have the same shape."""
        is_pair = a.dim() == 2 and a.shape == b.shape and len(a) > 0
        # Before this rank raises: the others would wait for its answer.
        self.peers().check_same(a.shape if is_pair else (0, 0), device=a.device)
        if not is_pair:
            raise ValueError(
                f"`a` and `b` (of shapes {tuple(a.shape)} and {tuple(b.shape)}) must be two matrices of one shape, "
                "pairs x features: row i of one belongs to row i of the other."
            )
        dtype = torch.float64 if a.dtype is torch.float64 else torch.float32
        return a.to(dtype), b.to(dtype)
