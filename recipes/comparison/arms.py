"""Definition of a study, with its variants, their hyper-parameters and the overrides of each run."""

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
    """Training method that a study compares with others, such as an optimizer with its settings.

    Attributes:
        overrides: Overrides of `recipes/train.py` that select the variant.
        shares: Batch sizes as fractions of the number of training images. The table has one row for each.
        axes: Tuned keys of `optim` with minimum and maximum value, on a logarithmic scale.
        like: Variant from which this one differs in one component. They are compared at the same batch size.
    """

    __pydantic_config__ = STRICT

    overrides: tuple[str, ...]
    shares: tuple[float, ...]
    axes: Mapping[str, tuple[float, float]]
    like: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of the tuning runs, which select hyper-parameters by the accuracy on held-out training images.

    Attributes:
        num_trials: Number of points of a scrambled Sobol sequence. Its points in the unit cube are the same for every
            variant and batch size.
        seed: Seed of the tuning runs.
        num_images: Number of training images that are not held out.
        overrides: Overrides of the tuning runs.
    """

    __pydantic_config__ = STRICT

    num_trials: int
    seed: int
    num_images: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FinalTests:
    """Settings of the final training runs, which measure the test accuracy that the table reports.

    Attributes:
        seeds: Seeds, which are the same for every variant and batch size, so that differences are paired.
        num_images: Number of training images.
        overrides: Overrides of the final runs.
    """

    __pydantic_config__ = STRICT

    seeds: tuple[int, ...]
    num_images: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """Combination of a variant and a batch size, which is one row of the result table."""

    arm: str
    share: float

    @property
    def name(self) -> str:
        """Name of the combination and of its folder, such as `method_5.12` for 5.12 % of the training set.

        >>> Cell("method", 0.0512).name
        'method_5.12'
        """
        return f"{self.arm}_{100 * self.share:.3g}"


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """Plan of a study, in which all variants are tuned with equally many runs and tested with the same seeds.

    Attributes:
        arms: Variants by name.
        base: Reference variant with one batch size, with which all others are compared.
        only: Names of the variants to run. None: all.
        every_fit: Overrides of every training run.
        trial: Further overrides of every training run, which a variant may override.
        micro_batch: Number of images that BatchNorm normalizes together. Every batch size is a multiple.
        tuning: Tuning runs, see `Tuning`.
        testing: Final runs, see `FinalTests`.
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
            "BatchNorm normalizes this many images together. Set study.micro_batch=128",
        )
        why = "each variant is tuned at this many points. Set study.tuning.num_trials=6"
        require_whole("study.tuning.num_trials", self.tuning.num_trials, why)
        require_positive(
            "study.margin",
            self.margin,
            "variants within this margin count as equal. Set study.margin=0.3",
        )
        self._check_names()
        for arm_name, arm in self.arms.items():
            _check_arm(f"study.arms.{arm_name}", arm)
        if not self.testing.seeds:
            raise ValueError(
                "`study.testing.seeds` (=[]) must contain at least one seed, because every "
                "variant in `study.arms` is tested with each seed. Set "
                "study.testing.seeds=[1,2,3]."
            )
        if self.tuning.seed in self.testing.seeds:
            raise ValueError(
                f"`study.tuning.seed` (={self.tuning.seed}) must not be one of `study.testing.seeds`, "
                "because the tuned values are selected with that seed. Set study.tuning.seed=0, or "
                "another seed that is not tested."
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
                    f"`{key}` (={name}) must be one of the variants in `study.arms`: {arm_names}. Set {key} "
                    "to one of them."
                )
        shares = self.arms[self.base].shares
        if len(shares) != 1:
            raise ValueError(
                f"`study.arms.{self.base}.shares` (={list(shares)}) must contain only one fraction "
                "of the training data, because all other variants are compared with `study.base`. "
                "Remove the other fractions."
            )

    @property
    def base_cell(self) -> Cell:
        """Reference combination of variant and batch size, with which all others are compared."""
        return Cell(self.base, self.arms[self.base].shares[0])

    @property
    def cells(self) -> list[Cell]:
        """Combinations of variant and batch size to run, in the order of the configuration."""
        cells = []
        for arm_name, arm in self.arms.items():
            if self.only is None or arm_name in self.only:
                for share in arm.shares:
                    cells.append(Cell(arm_name, share))
        return cells

    def like(self, cell: Cell) -> Cell | None:
        """Return the cell to compare with this one, whose variant differs in only one component, or None."""
        arm_name = self.arms[cell.arm].like
        if arm_name is None:
            return None
        return Cell(arm_name, cell.share)

    def global_batch_size(self, cell: Cell, num_images: int) -> int:
        """Return the global batch size in images, rounded down to a multiple of the micro-batch size.

        It is a fraction of `num_images`, and at least one micro-batch.
        """
        num_micro_batches = int(round(cell.share * num_images / self.micro_batch, 6))
        return self.micro_batch * max(1, num_micro_batches)

    def points(self, cell: Cell) -> list[Point]:
        """Return the hyper-parameter values with which a variant is tuned, rounded to four significant digits."""
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
        """Return the overrides that are common to all tuning runs of a variant at one batch size."""
        seed = f"seed={self.tuning.seed}"
        return (*self._overrides(cell, self.tuning.num_images), *self.tuning.overrides, seed)

    def testing_overrides(self, cell: Cell, point: Point) -> tuple[str, ...]:
        """Return the overrides that are common to all final runs of a variant at one batch size."""
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
        why = "the batch size is this fraction of the training images. Set 0.25, for example"
        require_share(f"{key}.shares", share, why)
    for axis, (low, high) in arm.axes.items():
        if not 0 < low < high:
            raise ValueError(
                f"`{key}.axes.{axis}` (=[{low}, {high}]) must be two numbers above zero in "
                "ascending order, because the scale is logarithmic. Set [0.1, 10.0], for example."
            )


def point_overrides(point: Point) -> tuple[str, ...]:
    """Return the command-line overrides that set tuned hyper-parameters.

    >>> point_overrides({"lr": 10.0, "weight_decay": 5e-4})
    ('optim.lr=10.0', 'optim.weight_decay=0.0005')
    """
    return tuple(f"optim.{axis}={value}" for axis, value in point.items())
