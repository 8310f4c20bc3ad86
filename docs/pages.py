"""Builds the pages of the project: `python docs/pages.py`, then open `docs/html/index.html`. Warnings are errors.

A page stands beside the code that it is about. A link from one page to another stays a link between pages; a link to a
file that is no page leads to a copy of that file as text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Blocks of code, links, code in a line: what comes first holds the others.
PART = re.compile(
    r"^ *```.*?^ *```|(?P<before>!?\[[^\]]*\]\()(?P<path>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)|`[^`\n]+`"
    r'|(?P<html>src(?:set)?=")(?P<picture>[^"]+)"',
    re.MULTILINE | re.DOTALL,
)


def place_of(page: Path) -> Path:
    """Return where a Markdown file of the repository stands in the site: `a/b/README.md` is `a/b/index.md`.

    >>> place_of(Path("docs/start.md")), place_of(Path("lightning_hybrid/optim/README.md"))
    (PosixPath('start.md'), PosixPath('lightning_hybrid/optim/index.md'))
    """
    if page.parts[0] == "docs":
        page = Path(*page.parts[1:])
        return page.with_name("index.md") if page.name == "README.md" else page
    if page == Path("README.md"):
        return Path("overview.md")
    if page.parts[0] == ".github":  # Sphinx looks into no folder with a dot
        return Path("github", *page.parts[1:])
    return page.with_name("index.md") if page.name == "README.md" else page


def menu() -> set[Path]:
    """Return the pages in the menu, where they stand in the site: the entries of the toctrees of `index.md`."""
    entries = set()
    for body in re.findall(
        r"^```\{toctree\}\n(.*?)^```", (ROOT / "docs" / "index.md").read_text(), re.M | re.S
    ):
        for line in body.splitlines():
            if line and not line.startswith(":"):
                named = re.fullmatch(r".* <(.+)>", line)
                entries.add(Path(f"{named[1] if named else line}.md"))
    return entries


def rewritten(text: str, page: Path, pages: set[Path], out: Path) -> str:
    """Return the text of a page with links that lead to pages of the site or to copies of files."""
    here = place_of(page)

    def part(match: re.Match[str]) -> str:
        before, path, anchor = match["before"], match["path"], match["anchor"] or ""
        after = ")"
        if match["html"]:
            before, path, after = match["html"], match["picture"], '"'
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        target = Path(os.path.normpath(page.parent / path))
        if target / "README.md" in pages:
            target = target / "README.md"
        if target in pages:
            return f"{before}{os.path.relpath(place_of(target), here.parent)}{anchor})"
        if not (ROOT / target).is_file():  # a folder
            return before[1:-2]
        copy = Path("files") / target
        if target.suffix not in (".png", ".svg"):
            copy = copy.with_name(copy.name + ".txt")
        (out / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / target, out / copy)
        return f"{before}{os.path.relpath(copy, here.parent)}{after}"

    return PART.sub(part, text)


def write(out: Path) -> None:
    """Write all pages below `out`, from what git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    pages = {
        Path(name)
        for name in listed.split()
        if not name.startswith(("tests/", ".github/I")) and (ROOT / name).is_file()
    }
    in_menu = {*menu(), Path("index.md")}
    for page in pages:
        place = out / place_of(page)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = rewritten((ROOT / page).read_text(), page, pages, out)
        if (
            place_of(page) not in in_menu
        ):  # such as a record: other pages link to it, and Sphinx need not warn
            text = f"---\norphan: true\n---\n\n{text}"
        place.write_text(text)


if __name__ == "__main__":
    from sphinx.cmd.build import main

    source, html = ROOT / "docs" / "source", ROOT / "docs" / "html"
    shutil.rmtree(source, ignore_errors=True)
    write(source)
    failed = main(
        [
            "-q",
            "-W",
            "--keep-going",
            "-c",
            str(ROOT / "docs"),
            *sys.argv[1:],
            str(source),
            str(html),
        ]
    )
    shutil.copytree(
        source / "files", html / "files", dirs_exist_ok=True
    )  # pictures that are shown by HTML
    sys.exit(failed)
