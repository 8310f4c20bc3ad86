"""The look of every figure: as wide as a phone, names next to lines, one palette that light and dark pages share.

A figure is drawn for the width at which it is shown, so its text is never scaled: wider pages put several side by side.
Hues are those of Okabe & Ito 2008, which colour-blind readers tell apart, darkened until they can be read as text.
"""

from __future__ import annotations

import io
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
INK, MUTED, FAINT = "#1f2328", "#59636e", "#c8d1da"
SERIES = ("#0060a8", "#b34700", "#00714f", "#8f3f78", "#7a5b00", "#4a4fb5")
_IN_THE_DARK = (
    "#e6edf3",
    "#9198a1",
    "#4a535e",
    "#58a6ff",
    "#ff8f4a",
    "#3fc99b",
    "#e29ac4",
    "#e3b341",
    "#a5a8ff",
)
_RULES = "".join(
    f'svg [style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
    for light, dark in zip((INK, MUTED, FAINT, *SERIES), _IN_THE_DARK, strict=True)
    for kind in ("fill", "stroke")
)
_STYLE = {
    **{f"{name}.color": MUTED for name in ("xtick", "ytick")},
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **{f"axes.{name}": FONT_PX for name in ("titlesize", "labelsize")},
    "axes.axisbelow": True, "axes.edgecolor": FAINT, "axes.facecolor": "none", "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.prop_cycle": cycler(color=SERIES), "axes.titlelocation": "left", "axes.titleweight": "bold",
    "figure.dpi": 72, "font.family": "sans-serif", "font.size": FONT_PX, "grid.color": FAINT, "grid.linewidth": 0.5,
    "lines.markersize": 4, "svg.fonttype": "none", "svg.hashsalt": "figure", "text.color": INK,
    "xtick.labelsize": FONT_PX - 1, "ytick.labelsize": FONT_PX - 1,
}  # fmt: skip

Panel = tuple[Callable[[Axes], None], int]  # what draws it, and its height in pixels


def figure_of(panels: Sequence[Panel], *, columns: int = 1) -> Figure:
    """Draw panels, row by row, and write the name of each labelled line at its end."""
    heights = [
        max(height for _, height in panels[at : at + columns])
        for at in range(0, len(panels), columns)
    ] or [1]
    size = (WIDTH_PX * columns / 72, sum(heights) / 72)
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained")
        places = figure.subfigures(len(heights), columns, squeeze=False, height_ratios=heights)
        for place, (draw, height) in zip(places.flat, panels, strict=False):
            axes = place.subplots()
            draw(axes)
            title = textwrap.fill(axes.get_title("left"), 44)
            axes.set_title("", loc="left")
            place.suptitle(title, x=0.01, ha="left", fontsize=FONT_PX, weight="bold")
            _name_lines(axes, height)
    return figure


def _name_lines(axes: Axes, height: int) -> None:
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    least = 0.0
    gap = (FONT_PX + 2) / (0.6 * height)
    points: Any = {
        line: line.get_xydata() for line in axes.lines if not str(line.get_label()).startswith("_")
    }
    lines = [line for line, places in points.items() if len(places)]
    ends = sorted((to_axes.transform(points[line][-1])[1], i) for i, line in enumerate(lines))
    for place, (at, i) in enumerate(ends):
        at = min(max(at, least), 1 - gap * (len(ends) - 1 - place))
        least = at + gap
        style: Any = {"color": lines[i].get_color(), "fontsize": FONT_PX - 1, "va": "center"}
        axes.annotate(str(lines[i].get_label()), (1.02, at), xycoords="axes fraction", **style)


def in_units(axes: Axes, *, x: str | None = None, y: str | None = None) -> None:
    """Label ticks in a unit and thousands or thousandths of it; a pure number below a million stays as it is."""
    for axis, unit in ((axes.xaxis, x), (axes.yaxis, y)):
        if unit is not None:
            axis.set_major_formatter(partial(_tick, unit))
            axis.set_minor_formatter(NullFormatter())
            if axis.get_scale() == "linear":
                axis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))


def _tick(unit: str, value: float, place: int) -> str:
    is_plain = unit in ("", "%", "x") and abs(value) < 1e6
    return (
        f"{value:,g} {unit}".rstrip()
        if is_plain
        else EngFormatter(unit)(float(f"{value:.3g}")).rstrip()
    )


def svg_of(figure: Figure) -> str:
    """Return an SVG whose text is text, and whose colours follow the reader's choice of light or dark.

    >>> text = svg_of(figure_of([(lambda axes: axes.set_title("loss fell"), 200)]))
    >>> "prefers-color-scheme: dark" in text, ">loss fell</text>" in text, f'width="{WIDTH_PX}"' in text
    (True, True, True)
    """
    with rc_context(_STYLE), io.StringIO() as buffer:  # type: ignore[arg-type]
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(
        "pt", "", 2
    )  # of width and height: a point is a pixel here
    return text.replace(">", f"><style>@media (prefers-color-scheme: dark) {{{_RULES}}}</style>", 1)


def png_of(figure: Figure) -> bytes:
    """Return a PNG on white, two pixels for each of a page's."""
    with rc_context(_STYLE), io.BytesIO() as buffer:  # type: ignore[arg-type]
        figure.savefig(buffer, format="png", dpi=144, facecolor="white")
        return buffer.getvalue()


def write_svg(path: Path, panels: Sequence[Panel]) -> None:
    """Write panels, one below the other, as one SVG."""
    path.write_text(svg_of(figure_of(panels)))
