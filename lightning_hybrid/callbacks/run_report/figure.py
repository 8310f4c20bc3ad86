"""Style of all figures: phone width, labels next to lines, and colors for light and dark pages.

Figures are drawn at the width at which they are shown, so that their text is never scaled. Wider
pages show several figures side by side. The hues are those of Okabe & Ito 2008, which color-blind
readers can distinguish. They are darkened until they are readable as text.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

WIDTH_PX = 360
FONT_PX = 13
INK = "#1f2328"
MUTED = "#59636e"
FAINT = "#c8d1da"
SERIES = ("#0060a8", "#b34700", "#00714f", "#8f3f78", "#7a5b00", "#4a4fb5")
_DARK_COLORS = {
    INK: "#e6edf3",
    MUTED: "#9198a1",
    FAINT: "#4a535e",
    SERIES[0]: "#58a6ff",
    SERIES[1]: "#ff8f4a",
    SERIES[2]: "#3fc99b",
    SERIES[3]: "#e29ac4",
    SERIES[4]: "#e3b341",
    SERIES[5]: "#a5a8ff",
}
"""Colors in dark mode, by the corresponding colors in light mode."""


def _css_rules() -> str:
    """Return CSS rules that replace the colors of a light-mode SVG image with those of dark mode."""
    rules = ""
    for light, dark in _DARK_COLORS.items():
        for kind in ("fill", "stroke"):
            rules += f'svg [style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
    return rules


_STYLE = {
    "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": FONT_PX, "axes.labelsize": FONT_PX,
    "axes.axisbelow": True, "axes.edgecolor": FAINT, "axes.facecolor": "none", "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.prop_cycle": cycler(color=SERIES), "axes.titlelocation": "left", "axes.titleweight": "bold",
    "figure.dpi": 72, "font.family": "sans-serif", "font.size": FONT_PX, "grid.color": FAINT, "grid.linewidth": 0.5,
    "lines.markersize": 4, "svg.fonttype": "none", "svg.hashsalt": "figure", "text.color": INK,
    "xtick.labelsize": FONT_PX - 1, "ytick.labelsize": FONT_PX - 1,
}  # fmt: skip

Panel = tuple[Callable[[Axes], None], int]
"""Function that draws a panel, and the height of the panel in pixels."""


def figure_of(panels: Sequence[Panel], *, columns: int = 1) -> Figure:
    """Draw panels in a grid, row by row, with a label at the end of each line."""
    row_heights = []
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        row_heights.append(max(height for _, height in row))
    if not row_heights:
        row_heights = [1]

    size = (WIDTH_PX * columns / 72, sum(row_heights) / 72)
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained")
        subfigures = figure.subfigures(
            len(row_heights), columns, squeeze=False, height_ratios=row_heights
        )
        for subfigure, (draw, height) in zip(subfigures.flat, panels, strict=False):
            axes = subfigure.subplots()
            draw(axes)
            title = textwrap.fill(axes.get_title("left"), 44)
            axes.set_title("", loc="left")
            subfigure.suptitle(title, x=0.01, ha="left", fontsize=FONT_PX, weight="bold")
            _label_lines(axes, height)
    return figure


def _label_lines(axes: Axes, height: int) -> None:
    """Write the label of each line next to its last point, without overlaps."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    lines = []
    for line in axes.lines:
        if not str(line.get_label()).startswith("_") and len(line.get_xydata()):  # type: ignore[arg-type]
            lines.append(line)

    ends = []
    for index, line in enumerate(lines):
        points: Any = line.get_xydata()
        ends.append((to_axes.transform(points[-1])[1], index))
    ends.sort()

    lowest = 0.0
    gap = (FONT_PX + 2) / (0.6 * height)
    for num_below, (end, index) in enumerate(ends):
        num_above = len(ends) - 1 - num_below
        label_y = min(max(end, lowest), 1 - gap * num_above)
        lowest = label_y + gap
        line = lines[index]
        axes.annotate(
            str(line.get_label()),
            (1.02, label_y),
            xycoords="axes fraction",
            color=line.get_color(),
            fontsize=FONT_PX - 1,
            va="center",
        )


def in_units(axes: Axes, *, x: str | None = None, y: str | None = None) -> None:
    """Format the tick labels of the axes with units and SI prefixes.

    Numbers without a unit get a prefix only if they are at least one million.
    """
    for axis, unit in ((axes.xaxis, x), (axes.yaxis, y)):
        if unit is not None:
            axis.set_major_formatter(partial(_format_tick, unit))
            axis.set_minor_formatter(NullFormatter())
            if axis.get_scale() == "linear":
                axis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))


def _format_tick(unit: str, value: float, position: int) -> str:
    if not math.isfinite(value):
        return str(value)
    is_pure_number = unit in ("", "%", "x")
    if is_pure_number and abs(value) < 1e6:
        return f"{value:,g} {unit}".rstrip()
    rounded = float(f"{value:.3g}")
    return EngFormatter(unit)(rounded).rstrip()


def svg_of(figure: Figure) -> str:
    """Convert a figure to SVG, with selectable text and colors for light and dark mode.

    >>> text = svg_of(figure_of([(lambda axes: axes.set_title("loss fell"), 200)]))
    >>> "prefers-color-scheme: dark" in text, ">loss fell</text>" in text, f'width="{WIDTH_PX}"' in text
    (True, True, True)
    """
    with rc_context(_STYLE), io.StringIO() as buffer:  # type: ignore[arg-type]
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = text.replace("pt", "", 2)  # in width and height, because one point is one pixel here
    style = f"<style>@media (prefers-color-scheme: dark) {{{_css_rules()}}}</style>"
    return text.replace(">", f">{style}", 1)


def png_of(figure: Figure) -> bytes:
    """Convert a figure to PNG on a white background, at twice the resolution of a page."""
    with rc_context(_STYLE), io.BytesIO() as buffer:  # type: ignore[arg-type]
        figure.savefig(buffer, format="png", dpi=144, facecolor="white")
        return buffer.getvalue()


def write_svg(path: Path, panels: Sequence[Panel]) -> None:
    """Write panels to a single SVG file, one below the other."""
    path.write_text(svg_of(figure_of(panels)))
