"""Variants of a study, the points at which they are tuned, and the overrides of each fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ConfigDict
from torch.quasirandom import SobolEngine

from lightning_hybrid.checks import require_positive, require_share, require_whole

STRICT = ConfigDict(extra="forbid")

Point = dict[str, float]
"""Values of the tuned keys, by axis."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Variant of a study, which is one way to train.

    Attributes:
        overrides: Overrides of `recipes/train.py` that select the variant.
        shares: Batch sizes as fractions of the number of training images. The table has one cell for each.
        axes: Tuned keys of `optim` with minimum and maximum value, on a logarithmic scale.
        like: Variant from which this one differs in one part. They are compared at the same share.
    """

    __pydantic_config__ = STRICT

    overrides: tuple[str, ...]
    shares: tuple[float, ...]
    axes: Mapping[str, tuple[float, float]]
    like: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Fits that select the point of a cell by the accuracy on held-out training images.

    Attributes:
        num_trials: Number of points of a scrambled Sobol sequence, which are the same in the unit cube for every cell.
        seed: Seed of these fits.
        num_images: Number of training images that are not held out.
        overrides: Overrides of these fits.
    """

    __pydantic_config__ = STRICT

    num_trials: int
    seed: int
    num_images: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FinalTests:
    """Fits whose accuracy on the test images is reported in the table.

    Attributes:
        seeds: Seeds, which are the same for every cell, so that differences are paired.
        num_images: Number of training images.
        overrides: Overrides of these fits.
    """

    __pydantic_config__ = STRICT

    seeds: tuple[int, ...]
    num_images: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """Variant at one batch size, which is a row of the table."""

    arm: str
    share: float

    @property
    def name(self) -> str:
        """Name of the cell and of its folder.

        >>> Cell("method", 0.0512).name
        'method_5.12'
        """
        return f"{self.arm}_{100 * self.share:.3g}"


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """Plan of a study: all variants are tuned with equally many fits, then tested with the same seeds.

    Attributes:
        arms: Variants by name.
        base: Reference variant with one share, with which all others are compared.
        only: Names of the variants to run. None: all.
        every_fit: Overrides of every fit.
        trial: Further overrides of every fit, which a variant may override.
        micro_batch: Number of images that BatchNorm normalises together. Every batch size is a multiple.
        tuning: Tuning fits, see `Tuning`.
        testing: Test fits, see `FinalTests`.
        margin: Difference in percentage points within which variants count as equal.

    Raises:
        ValueError: A number is out of range, a variant is unknown, or the tuning seed is also a test seed.
    """

    __pydantic_config__ = STRICT

    arms: Mapping[str, Arm]
    base: str
    only: tuple[str, ...] | None
    every_fit: tuple[str, ...]
    trial: tuple[str, ...] = ()
    micro_batch: int
    tuning: Tuning
    testing: FinalTests
    margin: float = 0.3

    def __post_init__(self) -> None:
        require_whole(
            "study.micro_batch",
            self.micro_batch,
            "it is a number of images. Set study.micro_batch=128",
        )
        why = "each arm is tuned at this many points. Set study.tuning.num_trials=6"
        require_whole("study.tuning.num_trials", self.tuning.num_trials, why)
        require_positive(
            "study.margin",
            self.margin,
            "arms within this margin count as equal. Set study.margin=0.3",
        )
        self._check_names()
        for arm_name, arm in self.arms.items():
            _check_arm(f"study.arms.{arm_name}", arm)
        if not self.testing.seeds:
            raise ValueError(
                "`study.testing.seeds` (=[]) must have at least one seed, because every arm is "
                "tested with each of them. Set study.testing.seeds=[1,2,3]."
            )
        if self.tuning.seed in self.testing.seeds:
            raise ValueError(
                f"`study.tuning.seed` (={self.tuning.seed}) must not be among `study.testing.seeds`, "
                "because the tuned values were selected with that seed. Set another "
                "study.tuning.seed."
            )

    def _check_names(self) -> None:
        names = [("study.base", self.base)]
        for name in self.only or ():
            names.append(("study.only", name))
        for arm_name, arm in self.arms.items():
            if arm.like is not None:
                names.append((f"study.arms.{arm_name}.like", arm.like))
        for key, name in names:
            if name not in self.arms:
                arm_names = ", ".join(self.arms)
                raise ValueError(
                    f"`{key}` (={name}) must be one of the arms: {arm_names}. Set {key} to one of them."
                )
        shares = self.arms[self.base].shares
        if len(shares) != 1:
            raise ValueError(
                f"`study.arms.{self.base}.shares` (={list(shares)}) must contain only one share, because all other "
                "arms are compared with `study.base`. Remove the other shares."
            )

    @property
    def base_cell(self) -> Cell:
        """Cell with which all others are compared."""
        return Cell(self.base, self.arms[self.base].shares[0])

    @property
    def cells(self) -> list[Cell]:
        """Cells to run, in the order of the configuration."""
        cells = []
        for arm_name, arm in self.arms.items():
            if self.only is None or arm_name in self.only:
                for share in arm.shares:
                    cells.append(Cell(arm_name, share))
        return cells

    def like(self, cell: Cell) -> Cell | None:
        """Return the cell from which this one differs in one part, or None."""
        arm_name = self.arms[cell.arm].like
        if arm_name is None:
            return None
        return Cell(arm_name, cell.share)

    def global_batch_size(self, cell: Cell, num_images: int) -> int:
        """Return the batch size of a cell: its share of the images, rounded down to whole micro-batches.

        It is at least one micro-batch.
        """
        num_micro_batches = int(round(cell.share * num_images / self.micro_batch, 6))
        return self.micro_batch * max(1, num_micro_batches)

    def points(self, cell: Cell) -> list[Point]:
        """Return the points at which a cell is tuned, with values rounded to four digits."""
        axes = self.arms[cell.arm].axes
        unit_points = (
            SobolEngine(max(1, len(axes)), scramble=True, seed=0)
            .draw(self.tuning.num_trials)
            .tolist()
        )
        points = []
        for unit_point in unit_points:
            point = {}
            for (axis, (low, high)), unit in zip(axes.items(), unit_point, strict=False):
                point[axis] = float(f"{low * (high / low) ** unit:.4g}")
            points.append(point)
        return points

    def tuning_overrides(self, cell: Cell) -> tuple[str, ...]:
        """Return the overrides that all tuning fits of a cell share."""
        seed = f"seed={self.tuning.seed}"
        return (*self._overrides(cell, self.tuning.num_images), *self.tuning.overrides, seed)

    def testing_overrides(self, cell: Cell, point: Point) -> tuple[str, ...]:
        """Return the overrides that all test fits of a cell share."""
        return (
            *self._overrides(cell, self.testing.num_images),
            *self.testing.overrides,
            *point_overrides(point),
        )

    def _overrides(self, cell: Cell, num_images: int) -> tuple[str, ...]:
        batch = (
            f"global_batch_size={self.global_batch_size(cell, num_images)}",
            f"batch_size_per_rank={self.micro_batch}",
        )
        return (*self.every_fit, *self.trial, *self.arms[cell.arm].overrides, *batch)


def _check_arm(key: str, arm: Arm) -> None:
    for share in arm.shares:
        why = "it is a fraction of the training images. For example, set 0.25"
        require_share(f"{key}.shares", share, why)
    for axis, (low, high) in arm.axes.items():
        if not 0 < low < high:
            raise ValueError(
                f"`{key}.axes.{axis}` (=[{low}, {high}]) must be two numbers above zero, the lower one first, because "
                "the scale is logarithmic. For example, set [0.1, 10.0]."
            )


def point_overrides(point: Point) -> tuple[str, ...]:
    """Return the overrides that set a point.

    >>> point_overrides({"lr": 10.0, "weight_decay": 5e-4})
    ('optim.lr=10.0', 'optim.weight_decay=0.0005')
    """
    return tuple(f"optim.{axis}={value}" for axis, value in point.items())
