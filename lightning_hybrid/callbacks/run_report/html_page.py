"""Self-contained HTML pages with embedded plots, with a responsive layout and a dark mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.ticker import EngFormatter

from lightning_hybrid.callbacks.run_report.figure import Panel, figure_of, svg_of

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the templates that all pages share."""


class Good(str):
    """Text of a table cell that is highlighted as a good result."""


def render(template: Path, **values: Any) -> str:
    """Render an HTML page from a template.

    All values are escaped, except those that the template marks as safe.

    Args:
        template: Template file. It may extend `base.html` and import from `blocks.html`.
        **values: Values of the template's variables, including the `title` of the page.

    >>> page = render(TEMPLATES / "base.html", title="<b>")
    >>> "<title>&lt;b&gt;</title>" in page, "color-scheme" in page
    (True, True)
    """
    environment = Environment(
        loader=FileSystemLoader([TEMPLATES, template.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["value"] = format_value
    environment.filters["dictvalues"] = lambda row: row.values()
    environment.tests["good"] = lambda cell: isinstance(cell, Good)
    return environment.get_template(template.name).render(values).lstrip()


def pictures(panels: Sequence[Panel]) -> list[str]:
    """Draw each panel as a separate SVG image."""
    return [svg_of(figure_of([panel])) for panel in panels]


def format_value(value: Any, unit: str | None = None) -> str:
    """Format a value for display, with an SI prefix if it has a unit.

    None becomes an empty string. Numbers with a unit are rounded to four significant digits.

    >>> format_value(1 / 3), format_value(65536.0), format_value(None), format_value(True), format_value([1, "a"])
    ('0.333333', '65536', '', 'True', "[1, 'a']")
    >>> [format_value(2.23743e7, unit) for unit in ("B", "1", "1/s")], [format_value(s, "s") for s in (0.0525, 9000)]
    (['22.37 MB', '22.37 M', '22.37 M/s'], ['52.5 ms', '9,000 s'])
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if unit is None:
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    unit_name = unit.removeprefix("1")
    rounded = float(f"{value:.4g}")
    is_rate = unit_name == "/s"
    is_whole_seconds = unit_name == "s" and (value >= 1 or not value)
    if abs(value) < 1e6 and (unit_name == "" or is_rate or is_whole_seconds):
        text = f"{rounded:,g}"
        if float(value).is_integer():
            text = f"{value:,.0f}"
        return f"{text}/s" if is_rate else f"{text} {unit_name}".rstrip()
    if is_rate:
        return EngFormatter("")(rounded).rstrip() + unit_name
    return EngFormatter(unit_name)(rounded).rstrip()


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to a dictionary with dotted keys, as on the command line.

    Empty mappings are kept as values.

    >>> flatten({"optim": {"lr": 1.0, "betas": [0.9, 0.99]}, "logger": None, "tags": {}})
    {'optim.lr': 1.0, 'optim.betas': [0.9, 0.99], 'logger': None, 'tags': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
