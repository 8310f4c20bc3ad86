"""Where the elements of a tensor are when ranks share it: each holds one part, cut where sums of squares are cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

BLOCK = 1 << 14
"""Elements. The C++ passes sum squares by blocks of this size, the Triton kernels by chunks that divide it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a tensor that this rank holds: elements `begin` up to `end` of the whole, in its order of memory.

    Attributes:
        numel: Elements of the whole tensor.
        begin: The first element held, a multiple of `BLOCK`, or `numel` where the part is empty.
        end: One past the last, a multiple of `BLOCK` or `numel`.

    Raises:
        ValueError: The part is not within the tensor, or cuts a block.

    >>> Part(numel=40_000, begin=16_384, end=40_000)
    Part(numel=40000, begin=16384, end=40000)
    """

    numel: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end <= self.numel:
            raise ValueError(
                f"`begin` and `end` (={self.begin}, {self.end}) must be within the tensor, whose `numel` is "
                f"{self.numel}: a part is elements `begin` up to `end` of the whole. Take them from `spans`."
            )
        for name, value in (("begin", self.begin), ("end", self.end)):
            if value % BLOCK and value != self.numel:
                raise ValueError(
                    f"`{name}` (={value}) must be a multiple of {BLOCK} or the tensor's end ({self.numel}): sums of "
                    "squares are by whole blocks, so that their bits do not depend on who holds which part. Take it "
                    "from `spans`."
                )


def spans(numel: int, num_parts: int, block: int = BLOCK) -> list[tuple[int, int]]:
    """Cut `numel` elements at multiples of `block` into `num_parts` spans `(begin, end)`, as equal as that allows.

    Each element is in one span, in order; with fewer blocks than parts some spans are empty. A block more, where the
    number does not divide, goes to late spans, since the last block may be short.

    >>> spans(10, 2, block=4), spans(3, 2, block=4)
    ([(0, 4), (4, 10)], [(0, 0), (0, 3)])
    """
    num_blocks = -(-numel // block)
    cuts = [min(numel, num_blocks * part // num_parts * block) for part in range(num_parts + 1)]
    return list(itertools.pairwise(cuts))


def is_split(numel: int, num_parts: int, block: int = BLOCK) -> bool:
    """Whether a tensor is large enough to be shared: of fewer than `num_parts` blocks, every rank holds all of it.

    >>> is_split(8, 2, block=4), is_split(5, 2, block=4), is_split(4, 2, block=4)
    (True, True, False)
    """
    return num_parts > 1 and numel > block * (num_parts - 1)
