"""Pages that need no other file, on a phone or a desk, light or dark: HTML with its pictures inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.ticker import EngFormatter

from lightning_hybrid.callbacks.run_report.figure import Panel, figure_of, svg_of

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the frame, the style and the parts of all pages."""


class Good(str):
    """Text of a cell that is the best of its row."""


def render(template: Path, **values: Any) -> str:
    """Fill in a template. All values are escaped, except those that the template marks as safe.

    Args:
        template: File, which may extend `base.html` and import from `blocks.html`.
        values: Values of its names; `title` is that of the page.

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
    """Return each panel as an SVG of its own."""
    return [svg_of(figure_of([panel])) for panel in panels]


def format_value(value: Any, unit: str | None = None) -> str:
    """Format a value for people: nothing for None; with a unit, four digits and thousands or thousandths of it.

    >>> format_value(1 / 3), format_value(65536.0), format_value(None), format_value(True), format_value([1, "a"])
    ('0.333333', '65536', '', 'True', "[1, 'a']")
    >>> [format_value(2.23743e7, unit) for unit in ("B", "1", "1/s")], [format_value(s, "s") for s in (0.0525, 9000)]
    (['22.37 MB', '22.37 M', '22.37 M/s'], ['52.5 ms', '9,000 s'])
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if unit is None:
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    name = unit.removeprefix("1")
    number = float(f"{value:.4g}")
    if abs(value) < 1e6 and (name in ("", "/s") or (name == "s" and (value >= 1 or not value))):
        text = f"{value:,.0f}" if float(value).is_integer() else f"{number:,g}"
        return text + (name if name == "/s" else f" {name}".rstrip())
    return (
        EngFormatter("")(number).rstrip() + name
        if name == "/s"
        else EngFormatter(name)(number).rstrip()
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to keys as on the command line; empty groups stay as they are.

    >>> flatten({"optim": {"lr": 1.0, "betas": [0.9, 0.99]}, "logger": None, "tags": {}})
    {'optim.lr': 1.0, 'optim.betas': [0.9, 0.99], 'logger': None, 'tags': {}}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{name}.")
        else:
            found[name] = value
    return found
