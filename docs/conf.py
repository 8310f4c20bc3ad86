"""Sphinx: Markdown by MyST, the look by furo, the API from the docstrings. `pages.py` calls it."""

from __future__ import annotations

import re

import lightning_hybrid

project = "lightning-hybrid"
author = "The lightning-hybrid authors"
copyright = author
version = release = lightning_hybrid.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_static_path = html_css_files = ["style.css"]
html_title = "lightning-hybrid"
html_copy_source = False
default_role = "code"
highlight_language = "text"  # literal blocks of docstrings are equations and tables, not Python
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath"]
napoleon_custom_sections = ["Source", "Collective"]
autodoc_typehints = "none"  # types stand in the signature
autodoc_member_order = "bysource"
nitpicky = False
suppress_warnings = ["misc.highlighting_failure"]
if tags.has("online"):  # type: ignore[name-defined]  # noqa: F821  links to others need the network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }

SECTION = re.compile(r"(Args|Raises|Returns|Yields|Attributes|Example|Source|Collective|Note)s?:")


def literal_blocks(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Show indented parts of a docstring as they are, such as equations and tables, and `*`, `|`, `_` as themselves."""
    for i in range(
        len(lines) - 2, -1, -1
    ):  # several arguments, described as one, whose names take several lines
        if re.fullmatch(r" {4}[\w, ]+,", lines[i]):
            lines[i] += " " + lines.pop(i + 1).strip()
    shown, is_section, is_literal, is_table = [], False, False, False
    for i, line in enumerate(lines):
        indented = line.startswith("    ") and not is_section
        if line and not line.startswith(" "):
            is_section = SECTION.fullmatch(line.strip()) is not None
        before = lines[i - 1] if i else ""
        if indented and not is_literal and not before:
            shown += ["::", ""]
        is_literal = indented or (is_literal and not line)
        is_edge = re.match(r"=+ +=+", line) is not None
        is_table = is_edge or (is_table and line != "")
        shown.append(line if is_literal or is_table or line.startswith(">>>") else escaped(line))
    lines[:] = shown


def escaped(line: str) -> str:
    """Return a line of prose whose `*`, `|` and closing `_` outside of backticks mean themselves, but for a bullet."""
    if line.startswith("* "):
        return "* " + escaped(line[2:])
    parts = line.split("`")
    parts[::2] = [re.sub(r"([*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def setup(app: object) -> None:
    """Register what is done with each docstring, before napoleon reads it."""
    app.connect("autodoc-process-docstring", literal_blocks, priority=100)  # type: ignore[attr-defined]
