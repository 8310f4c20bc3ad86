"""Robust linear fit to measured message times, with confidence intervals and a test of linearity.

    time = latency + (bytes + min(bytes, burst)) / rate          alpha-beta (Hockney 1994); the burst is our addition

Times span five orders of magnitude, so errors are relative. Outliers are all in one direction, so
the fit minimises the absolute deviations of the medians. Wrong times at one size do not bend the
line, but appear in `errors`. If switches store bursts, message times do not follow a line. Therefore
a few burst sizes are tried, and one is used only if it clearly improves the fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Burst sizes to try: none, an Ethernet frame, a page, a jumbo frame, and segments that network cards assemble.
BURSTS_BYTES = (0, 1500, 4096, 9000, 16384, 65536)

# A burst must reduce the error of the fit to this fraction. Our choice, which noise alone does not reach.
LEAST_GAIN = 0.5

# A link with a larger error of the median at some size is reported as not linear. Our choice.
MOST_ERROR = 0.25

CONFIDENCE = 0.9
# Number of bootstrap draws. The bounds of a 90 % interval are then the 20th draws from either side.
NUM_DRAWS = 400


@dataclass(frozen=True, kw_only=True)
class LineFit:
    """Fitted latency and bandwidth of a link, with confidence intervals.

    The true values lie in their intervals with probability `confidence`, provided that the link fits
    this model and times differ only by chance. `errors` holds, for each size, the median measured time over
    the fitted time, minus one.
    """

    latency_s: float
    bytes_per_s: float
    latency_interval_s: tuple[float, float]
    rate_interval_bytes_per_s: tuple[float, float]
    confidence: float
    burst_bytes: int
    errors: tuple[tuple[int, float], ...]
    num_samples: int

    @property
    def typical_error(self) -> float:
        """Median relative error over message sizes."""
        return float(np.median([abs(error) for _, error in self.errors]))

    @property
    def worst(self) -> tuple[int, float]:
        """Message size with the largest relative error, and that error."""
        return max(self.errors, key=lambda pair: abs(pair[1]))

    @property
    def is_line(self) -> bool:
        """True if the fit is within 25 % of the measured time at every message size."""
        return abs(self.worst[1]) <= MOST_ERROR

    def seconds(self, num_bytes: float) -> float:
        """Return the fitted time of one message in seconds."""
        return self.latency_s + (num_bytes + min(num_bytes, self.burst_bytes)) / self.bytes_per_s


def fit_line(times_s: Mapping[int, Sequence[float]], *, seed: int = 0) -> LineFit:
    """Estimate the latency and bandwidth of a link from message times, grouped by message size.

    Intervals are percentiles of a bootstrap (Efron 1979): samples of each size are drawn with
    replacement, and the line is fitted to their medians. The result is deterministic.

    Raises:
        ValueError: There are fewer than three sizes, or a time is not positive.

    >>> fit = fit_line({size: [1e-3 + size / 1e6] * 5 for size in (4, 1000, 100_000)})
    >>> round(fit.latency_s, 9), round(fit.bytes_per_s), fit.is_line
    (0.001, 1000000, True)
    """
    if len(times_s) < 3 or min(times_s) < 0:
        raise ValueError(
            f"`times_s` (of {sorted(times_s)} bytes) must contain at least three sizes, because any two sizes lie "
            "exactly on a line. Increase the time limit with measure.limit_s=<seconds>."
        )
    sizes = sorted(times_s)
    if any(not times_s[size] or not min(times_s[size]) > 0 for size in sizes):
        raise ValueError(
            "`times_s` must contain at least one time for each size, and all times must be positive, because times "
            "are measured durations. Repeat the measurement."
        )
    medians_s = np.array([float(np.median(times_s[size])) for size in sizes])
    fits = {burst: _lines(_loads(sizes, burst), medians_s[None]) for burst in BURSTS_BYTES}
    found = {burst: float(lines[2][0]) for burst, lines in fits.items()}
    best = min(found, key=lambda burst: found[burst])
    # With four sizes or fewer, a third parameter would always fit.
    burst = best if found[best] < LEAST_GAIN * found[0] and len(sizes) > 4 else 0
    loads = _loads(sizes, burst)
    latency_s = float(fits[burst][0][0])
    per_byte_s = float(fits[burst][1][0])
    generator = np.random.default_rng(seed)
    drawn_s = np.stack(
        [_drawn_medians(np.asarray(times_s[size]), generator) for size in sizes], axis=1
    )
    latencies_s, per_bytes_s, _ = _lines(loads, drawn_s)
    tail = 100 * (1 - CONFIDENCE) / 2
    low_s, high_s = np.percentile(latencies_s, [tail, 100 - tail])
    slow, fast = np.percentile(per_bytes_s, [100 - tail, tail])
    errors = medians_s / (latency_s + loads * per_byte_s) - 1
    return LineFit(
        latency_s=latency_s,
        bytes_per_s=_rate(per_byte_s),
        latency_interval_s=(min(float(low_s), latency_s), max(float(high_s), latency_s)),
        rate_interval_bytes_per_s=(
            _rate(max(float(slow), per_byte_s)),
            _rate(min(float(fast), per_byte_s)),
        ),
        confidence=CONFIDENCE,
        burst_bytes=burst,
        errors=tuple((size, float(error)) for size, error in zip(sizes, errors, strict=True)),
        num_samples=sum(len(times_s[size]) for size in sizes),
    )


def _rate(per_byte_s: float) -> float:
    return 1 / per_byte_s if per_byte_s > 0 else math.inf


def _loads(sizes: Sequence[int], burst: int) -> np.ndarray:
    # A burst is stored before it is forwarded, so a message waits for these bytes twice.
    return np.array([size + min(size, burst) for size in sizes], dtype=float)


def _drawn_medians(samples_s: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    places = generator.integers(0, len(samples_s), size=(NUM_DRAWS, len(samples_s)))
    return np.median(samples_s[places], axis=1)


def _lines(loads: np.ndarray, medians_s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit a line to each row of times, and return latencies, seconds per byte and mean relative errors.

    `medians_s` has one row per fit.
    """
    # A line of least absolute deviations goes through two points, or through one at a bound. Try all of them.
    first, second = np.triu_indices(len(loads), k=1)
    slopes = (medians_s[:, second] - medians_s[:, first]) / (loads[second] - loads[first])
    starts = medians_s[:, first] - slopes * loads[first]
    through = np.flatnonzero(loads > 0)
    zeros = np.zeros_like(medians_s)
    slopes = np.concatenate([slopes, zeros, medians_s[:, through] / loads[through]], axis=1)
    starts = np.concatenate([starts, medians_s, zeros[:, through]], axis=1)
    fitted = starts[:, :, None] + slopes[:, :, None] * loads
    errors = np.abs(fitted / medians_s[:, None, :] - 1).mean(axis=2)
    # Latency and seconds per byte are not negative.
    errors[(slopes < 0) | (starts < 0)] = math.inf
    best = errors.argmin(axis=1)
    rows = np.arange(len(medians_s))
    return starts[rows, best], slopes[rows, best], errors[rows, best]
