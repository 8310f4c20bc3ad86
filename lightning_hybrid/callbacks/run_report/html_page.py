"""Pages that need no other file: HTML with its pictures inside."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
:root { color-scheme: light dark; } body { color: CanvasText; background: Canvas; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } img { max-width: 100%; }
table { border-collapse: collapse; font-size: 0.9rem; } summary { cursor: pointer; }
th, td { text-align: left; padding: 0.15rem 0.9rem 0.15rem 0; border-bottom: 1px solid #8886; vertical-align: top; }
.scrolls { overflow-x: auto; } code { font-size: 0.9em; }
"""


def page(title: str, sections: Iterable[str]) -> str:
    """Return a whole page; `title` is text, `sections` are HTML."""
    name = html.escape(title)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{name}</title><style>{_STYLE}</style>"
    body = "\n".join([f"<h1>{name}</h1>", *sections])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of any values, as text.

    >>> table(["name"], [["<b>"], [None], [0.123456789]]).count("</tr>"), "&lt;b&gt;" in table([], [["<b>"]])
    (4, True)
    """
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(format_value(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scrolls"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def section(title: str, content: str, *, is_open: bool = True) -> str:
    """Return a heading over `content` (HTML); a closed section opens at a click."""
    name = html.escape(title)
    if is_open:
        return f"<h2>{name}</h2>\n{content}"
    return f"<h2>{name}</h2>\n<details><summary>show</summary>\n{content}\n</details>"


def paragraph(words: str) -> str:
    """Return a paragraph of text."""
    return f"<p>{html.escape(words)}</p>"


def png_picture(png: bytes, *, alt: str) -> str:
    """Return a PNG, embedded."""
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def png_of(figure: Figure) -> bytes:
    """Draw a figure as PNG."""
    with io.BytesIO() as buffer:
        figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def format_value(value: Any) -> str:
    """Format a value for people: six digits of a number, nothing for None.

    >>> format_value(1 / 3), format_value(65536.0), format_value(None), format_value(True), format_value([1, "a"])
    ('0.333333', '65536', '', 'True', "[1, 'a']")
    """
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
