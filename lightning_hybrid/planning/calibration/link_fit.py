"""Robust linear fit to measured message times, with confidence intervals and a test of linearity.

    time = latency + (bytes + min(bytes, burst)) / rate          alpha-beta (Hockney 1994); the burst is our addition

Times span five orders of magnitude, so errors are relative. Outliers are all in one direction, so
the fit minimizes the absolute deviations of the medians. Wrong times at one size do not bend the
line, but appear in `errors`. If switches store bursts, message times do not follow a line. Therefore
a few burst sizes are tried, and one is used only if it clearly improves the fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Measured times in seconds, by message size in bytes.
MessageTimes = Mapping[int, Sequence[float]]

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
class _Lines:
    """Fitted lines, with one array element per fit.

    Attributes:
        latencies_s: Latencies in seconds.
        s_per_byte: Inverse bandwidths in seconds per byte.
        errors: Mean relative errors over message sizes.
    """

    latencies_s: np.ndarray
    s_per_byte: np.ndarray
    errors: np.ndarray


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
        magnitudes = [abs(error) for _, error in self.errors]
        return float(np.median(magnitudes))

    @property
    def worst(self) -> tuple[int, float]:
        """Message size with the largest relative error, and that error."""
        return max(self.errors, key=lambda pair: abs(pair[1]))

    @property
    def is_line(self) -> bool:
        """True if the fit is within 25 % of the measured time at every message size."""
        _, worst_error = self.worst
        return abs(worst_error) <= MOST_ERROR

    def seconds(self, num_bytes: float) -> float:
        """Return the fitted time of one message in seconds."""
        load_bytes = num_bytes + min(num_bytes, self.burst_bytes)
        return self.latency_s + load_bytes / self.bytes_per_s


def fit_line(times_s: MessageTimes, *, seed: int = 0) -> LineFit:
    """Estimate the latency and bandwidth of a link from message times, grouped by message size.

    Intervals are percentiles of a bootstrap (Efron 1979): samples of each size are drawn with
    replacement, and the line is fitted to their medians. The result is deterministic.

    Raises:
        ValueError: There are fewer than three sizes, or a time is not positive.

    >>> fit = fit_line({size: [1e-3 + size / 1e6] * 5 for size in (4, 1000, 100_000)})
    >>> round(fit.latency_s, 9), round(fit.bytes_per_s), fit.is_line
    (0.001, 1000000, True)
    """
    _check_times(times_s)
    sizes = sorted(times_s)
    medians_s = _medians(times_s, sizes)
    lines_by_burst = {}
    for burst in BURSTS_BYTES:
        loads = _loads(sizes, burst)
        lines_by_burst[burst] = _fit_lines(loads, medians_s[np.newaxis])

    burst = _choose_burst(lines_by_burst, len(sizes))
    loads = _loads(sizes, burst)
    line = lines_by_burst[burst]
    latency_s = float(line.latencies_s[0])
    s_per_byte = float(line.s_per_byte[0])
    errors = medians_s / (latency_s + loads * s_per_byte) - 1

    drawn_lines = _fit_lines(loads, _bootstrap_medians(times_s, sizes, seed))
    latency_interval_s = _interval(drawn_lines.latencies_s, latency_s)
    fast_s_per_byte, slow_s_per_byte = _interval(drawn_lines.s_per_byte, s_per_byte)
    return LineFit(
        latency_s=latency_s,
        bytes_per_s=_rate(s_per_byte),
        latency_interval_s=latency_interval_s,
        rate_interval_bytes_per_s=(_rate(slow_s_per_byte), _rate(fast_s_per_byte)),
        confidence=CONFIDENCE,
        burst_bytes=burst,
        errors=tuple(zip(sizes, errors.tolist(), strict=True)),
        num_samples=sum(len(times_s[size]) for size in sizes),
    )


def _check_times(times_s: MessageTimes) -> None:
    """Raise `ValueError` if a line cannot be fitted to the times."""
    if len(times_s) < 3 or min(times_s) < 0:
        raise ValueError(
            f"`times_s` (of {sorted(times_s)} bytes) must contain at least three sizes, because a line always fits "
            "two sizes exactly. Increase the time limit with measure.limit_s=<seconds>."
        )
    for samples_s in times_s.values():
        if not samples_s or not min(samples_s) > 0:
            raise ValueError(
                "`times_s` must contain at least one time for each size, and all times must be positive. Repeat the "
                "measurement."
            )


def _choose_burst(lines_by_burst: Mapping[int, _Lines], num_sizes: int) -> int:
    """Return the burst size with the best fit, or 0 if no burst improves the fit clearly.

    Args:
        lines_by_burst: Line fitted to the medians, for each burst size.
        num_sizes: Number of message sizes.
    """
    # With four sizes or fewer, a third parameter would always fit.
    if num_sizes <= 4:
        return 0
    error_by_burst = {}
    for burst, lines in lines_by_burst.items():
        error_by_burst[burst] = float(lines.errors[0])
    best_burst = min(error_by_burst, key=lambda burst: error_by_burst[burst])
    if error_by_burst[best_burst] < LEAST_GAIN * error_by_burst[0]:
        return best_burst
    return 0


def _rate(s_per_byte: float) -> float:
    if s_per_byte > 0:
        return 1 / s_per_byte
    return math.inf


def _loads(sizes: Sequence[int], burst: int) -> np.ndarray:
    """Return the bytes of each message, where bytes stored before they are forwarded count twice."""
    loads = []
    for size in sizes:
        # A burst is stored before it is forwarded, so a message waits for these bytes twice.
        stored_bytes = min(size, burst)
        loads.append(size + stored_bytes)
    return np.array(loads, dtype=float)


def _medians(times_s: MessageTimes, sizes: Sequence[int]) -> np.ndarray:
    medians_s = []
    for size in sizes:
        median_s = np.median(times_s[size])
        medians_s.append(float(median_s))
    return np.array(medians_s)


def _bootstrap_medians(times_s: MessageTimes, sizes: Sequence[int], seed: int) -> np.ndarray:
    """Return the medians of bootstrap samples, as an array of shape (draws, sizes)."""
    generator = np.random.default_rng(seed)
    medians_of_sizes = []
    for size in sizes:
        samples_s = np.asarray(times_s[size])
        num_samples = len(samples_s)
        indices = generator.integers(0, num_samples, size=(NUM_DRAWS, num_samples))
        drawn_samples_s = samples_s[indices]
        medians_of_sizes.append(np.median(drawn_samples_s, axis=1))
    return np.stack(medians_of_sizes, axis=1)


def _interval(drawn: np.ndarray, estimate: float) -> tuple[float, float]:
    """Return the confidence interval of an estimate, based on estimates from bootstrap samples.

    The interval is extended to the estimate if the estimate is outside of it.
    """
    tail_percent = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, [tail_percent, 100 - tail_percent])
    low_bound = min(float(low), estimate)
    high_bound = max(float(high), estimate)
    return low_bound, high_bound


def _fit_lines(loads: np.ndarray, medians_s: np.ndarray) -> _Lines:
    """Fit a line of least absolute deviations to each row of times.

        time = latency + load * seconds per byte,   both at least 0

    Args:
        loads: Number of bytes that a message of each size waits for.
        medians_s: Median times, of shape (fits, sizes).
    """
    latencies_s, slopes = _candidate_lines(loads, medians_s)
    transfer_s = slopes[:, :, np.newaxis] * loads
    fitted_s = latencies_s[:, :, np.newaxis] + transfer_s
    relative_errors = fitted_s / medians_s[:, np.newaxis, :] - 1
    mean_errors = np.abs(relative_errors).mean(axis=2)
    is_negative = (slopes < 0) | (latencies_s < 0)
    mean_errors[is_negative] = math.inf

    fits = np.arange(len(medians_s))
    best = mean_errors.argmin(axis=1)
    return _Lines(
        latencies_s=latencies_s[fits, best],
        s_per_byte=slopes[fits, best],
        errors=mean_errors[fits, best],
    )


def _candidate_lines(loads: np.ndarray, medians_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the latencies and slopes of all lines that may be the best fit, of shape (fits, lines).

    A line of least absolute deviations goes through two points. If its slope or its latency is at the bound of zero, it
    goes through one point.
    """
    # Through two points.
    first, second = np.triu_indices(len(loads), k=1)
    time_differences_s = medians_s[:, second] - medians_s[:, first]
    slopes_of_pairs = time_differences_s / (loads[second] - loads[first])
    latencies_of_pairs = medians_s[:, first] - slopes_of_pairs * loads[first]

    # Through one point, with slope 0.
    flat_slopes = np.zeros_like(medians_s)

    # Through one point, with latency 0.
    has_load = loads > 0
    slopes_from_origin = medians_s[:, has_load] / loads[has_load]
    zero_latencies = np.zeros_like(slopes_from_origin)

    latencies_s = np.concatenate([latencies_of_pairs, medians_s, zero_latencies], axis=1)
    slopes = np.concatenate([slopes_of_pairs, flat_slopes, slopes_from_origin], axis=1)
    return latencies_s, slopes
