"""Pages that need no other file, on a phone or a desk, light or dark: HTML with its pictures inside."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.ticker import EngFormatter

from lightning_hybrid.callbacks.run_report.figure import Panel, figure_of, svg_of

_STYLE = """
:root { color-scheme: light dark; } body { color: CanvasText; background: Canvas; overflow-wrap: break-word;
font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2rem; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: 0.9rem; } th { color: GrayText; font-weight: normal; }
th, td { text-align: left; padding: 0.15rem 0.9rem 0.15rem 0; border-bottom: 1px solid #8886; vertical-align: top; }
.note td:not(:last-child) { white-space: nowrap; } .scrolls { overflow-x: auto; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.figures svg { max-width: 100%; height: auto; } td.good { font-weight: bold; }
td:last-child { overflow-wrap: anywhere; }
@media (max-width: 40rem) { th, td { padding-right: 0.5rem; } .note th { display: none; }
tr.note { display: flex; flex-wrap: wrap; border-bottom: 1px solid #8886; } tr.note td { border: 0; padding-top: 0; }
tr.note td:first-child, tr.note td:last-child { flex-basis: 100%; } tr.note td:last-child { opacity: 0.8; } }
"""


class Good(str):
    """Text of a cell that is the best of its row."""


def page(title: str, sections: Iterable[str]) -> str:
    """Return a whole page; `title` is text, `sections` are HTML."""
    name = html.escape(title)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{name}</title><style>{_STYLE}</style>"
    body = "\n".join([f"<h1>{name}</h1>", *sections])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, has_notes: bool = False) -> str:
    """Return a table of any values, as text; a phone shows the last column of one with notes below the row.

    >>> table(["name"], [["<b>"], [None], [0.123456789]]).count("</tr>"), "&lt;b&gt;" in table([], [["<b>"]])
    (4, True)
    """
    row = '<tr class="note">' if has_notes else "<tr>"
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = [f"{row}{head}</tr>"] if any(header) else []
    for cells in rows:
        marks = [' class="good"' if isinstance(cell, Good) else "" for cell in cells]
        texts = [html.escape(format_value(cell)) for cell in cells]
        lines.append(row + "".join(f"<td{m}>{t}</td>" for m, t in zip(marks, texts, strict=True)) + "</tr>")
    return '<div class="scrolls"><table>\n' + "\n".join(lines) + "\n</table></div>"


def section(title: str, content: str, *, is_open: bool = True) -> str:
    """Return a heading over `content` (HTML); a closed section opens at a click; nothing for no content."""
    name = html.escape(title)
    if not content or is_open:
        return f"<h2>{name}</h2>\n{content}" if content else ""
    return f"<details><summary><h2 style='display: inline-block'>{name}</h2></summary>\n{content}\n</details>"


def paragraph(words: str) -> str:
    """Return a paragraph of text; nothing for no words."""
    return f"<p>{html.escape(words)}</p>" if words else ""


def pictures(panels: Sequence[Panel]) -> str:
    """Return panels as pictures of their own, side by side where there is room."""
    return f'<div class="figures">{"".join(svg_of(figure_of([panel])) for panel in panels)}</div>' if panels else ""


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
    name, number = unit.removeprefix("1"), float(f"{value:.4g}")
    if abs(value) < 1e6 and (name in ("", "/s") or (name == "s" and (value >= 1 or not value))):
        text = f"{value:,.0f}" if float(value).is_integer() else f"{number:,g}"
        return text + (name if name == "/s" else f" {name}".rstrip())
    return EngFormatter("")(number).rstrip() + name if name == "/s" else EngFormatter(name)(number).rstrip()


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
