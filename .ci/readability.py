"""Check of density and docstrings: fails where a file is packed or a docstring begins badly.

    python .ci/readability.py                   check the package and the recipes
    python .ci/readability.py path/to/file.py   check some files, without the exceptions
    python .ci/readability.py --update          drop exceptions that are no longer needed

A file may have at most 9 tokens (names, numbers and operators; no strings, no comments) per line of
code. The first line of a docstring begins with a verb or a noun and holds no semicolon.

Files that do not pass yet stand in `readability_exceptions.json` with their figures. A figure may
shrink and never grow: a file that gets worse than its entry fails, and so does an entry that is
higher than its file needs, until `--update` has lowered it. No entry is ever added.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = Path(__file__).with_name("readability_exceptions.json")
FOLDERS = ("lightning_hybrid", "recipes")
MAX_TOKENS_PER_LINE = 9.0
FEW_LINES = 20  # the density of a shorter file says nothing

_BAD_BEGINNING = re.compile(r"(What|Which|Who|Whose|Whether|How|That|Those|Where|As|For|Of)\b")
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_STRINGS = {tokenize.STRING}
for _name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END"):  # from Python 3.12 on
    if hasattr(tokenize, _name):
        _STRINGS.add(getattr(tokenize, _name))

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Figures:
    """Density of one file, and the first lines of its docstrings that begin badly.

    Args:
        tokens_per_line: Tokens per line of code, rounded up to a tenth.
        bad_first_lines: First lines that have a forbidden beginning or a semicolon.
    """

    tokens_per_line: float
    bad_first_lines: tuple[str, ...]

    def is_worse_than(self, allowed: dict[str, float]) -> bool:
        """Return whether a figure is above its entry in the list of exceptions."""
        too_dense = self.tokens_per_line > allowed.get("tokens_per_line", MAX_TOKENS_PER_LINE)
        return too_dense or len(self.bad_first_lines) > allowed.get("bad_first_lines", 0)

    def exception(self) -> dict[str, float]:
        """Return the entry that this file needs. An empty one if it passes."""
        entry: dict[str, float] = {}
        if self.tokens_per_line > MAX_TOKENS_PER_LINE:
            entry["tokens_per_line"] = self.tokens_per_line
        if self.bad_first_lines:
            entry["bad_first_lines"] = len(self.bad_first_lines)
        return entry


def measure(path: Path) -> Figures:
    """Measure one Python file."""
    source = path.read_text(encoding="utf-8")
    docstring_lines: set[int] = set()
    bad_first_lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, _DOCUMENTED) or ast.get_docstring(node) is None:
            continue
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        docstring_lines.update(range(docstring.lineno, docstring.end_lineno + 1))
        first_line = (ast.get_docstring(node) or "").split("\n")[0]
        if _BAD_BEGINNING.match(first_line) or ";" in first_line:
            bad_first_lines.append(first_line)

    num_tokens = 0
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _NOT_CODE or token.start[0] in docstring_lines:
            continue
        code_lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in _STRINGS:
            num_tokens += 1

    tokens_per_line = 0.0
    if len(code_lines) > FEW_LINES:
        tokens_per_line = -(-10 * num_tokens // len(code_lines)) / 10
    return Figures(tokens_per_line, tuple(bad_first_lines))


def measure_all() -> dict[str, Figures]:
    """Measure every file of the package and of the recipes, by its path in the repository."""
    figures = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            figures[path.relative_to(ROOT).as_posix()] = measure(path)
    return figures


def problems(figures: dict[str, Figures], exceptions: dict[str, dict[str, float]]) -> list[str]:
    """Return a line for each file that fails, and for each exception that should shrink."""
    lines = []
    for name, measured in figures.items():
        allowed = exceptions.get(name, {})
        if measured.is_worse_than(allowed):
            lines.append(_complaint(name, measured, allowed))
        elif measured.exception() != allowed:
            lines.append(
                f"{name}: its exception can shrink. Run python .ci/readability.py --update"
            )
    for name in sorted(exceptions.keys() - figures.keys()):
        lines.append(f"{name}: there is no such file. Run python .ci/readability.py --update")
    return lines


def _complaint(name: str, measured: Figures, allowed: dict[str, float]) -> str:
    limit = allowed.get("tokens_per_line", MAX_TOKENS_PER_LINE)
    reasons = []
    if measured.tokens_per_line > limit:
        reasons.append(
            f"{measured.tokens_per_line} tokens per line of code, at most {limit}: unpack statements"
        )
    if len(measured.bad_first_lines) > allowed.get("bad_first_lines", 0):
        for first_line in measured.bad_first_lines:
            reasons.append(f"a docstring that should begin with a verb or a noun: {first_line!r}")
    return f"{name}: " + "; ".join(reasons)


def lowered(
    figures: dict[str, Figures], exceptions: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the exceptions with each figure as low as its file allows, and without useless ones."""
    kept = {}
    for name, allowed in exceptions.items():
        if name not in figures:
            continue
        needed = figures[name].exception()
        entry = {key: min(needed[key], limit) for key, limit in allowed.items() if key in needed}
        if entry:
            kept[name] = entry
    return kept


def main() -> int:
    """Run the check and return the exit status: 1 if a file fails."""
    parser = argparse.ArgumentParser(description="Check density and docstrings.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--update", action="store_true", help="lower the exceptions")
    arguments = parser.parse_args()

    if arguments.files:
        complaints = problems({str(path): measure(path) for path in arguments.files}, {})
    else:
        figures = measure_all()
        exceptions = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))
        if arguments.update:
            exceptions = lowered(figures, exceptions)
            EXCEPTIONS.write_text(json.dumps(exceptions, indent=1) + "\n", encoding="utf-8")
        complaints = problems(figures, exceptions)

    for complaint in complaints:
        print(complaint)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
