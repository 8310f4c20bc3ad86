"""Counts code lines of the package that only CUDA reaches: `python tests/evidence/cuda_lines.py [checkout [part ...]]`.

A file counts as a whole where it is imported only under a condition on CUDA, only by such files, or is one of `ALONE`;
elsewhere what stands under such a condition, and after one that leaves. Paths with one of the parts are left out.
"""

import ast
import re
import sys
from pathlib import Path

ALONE = ("health/abort.py", "health/device_waits.py", "full_accumulation.py")  # imported by all, for CUDA alone
ANYWHERE = ("comm/plan.py", "planning/plan_search.py", "planning/simulate.py")  # a cluster is planned on any machine
ON, OFF = re.compile(r"\b\w*(is|on)_cuda\b|by_backend\b|== 'cuda'|cuda\.is_avail"), re.compile(r"!= 'cuda'|== 'cpu'")
IMPORTS = re.compile(r"(?:from|import) (lightning_hybrid[\w.]*)(?: import ([\w, ]+))?")


def sign(test: ast.expr) -> int:
    """Return 1 for a condition that holds on CUDA alone, -1 for its opposite, else 0."""
    if isinstance(test, ast.BoolOp):
        return max(map(sign, test.values)) if isinstance(test.op, ast.And) else min(map(sign, test.values))
    if isinstance(test, ast.UnaryOp):
        return -sign(test.operand)
    return -1 if OFF.search(ast.unparse(test)) else int(bool(ON.search(ast.unparse(test))))


def lines_of(node: ast.AST, is_under: bool = False) -> set[int]:
    """Return the lines below a node that only CUDA reaches."""
    found = set(range(node.lineno, node.end_lineno + 1)) if is_under else set()
    of = sign(node.test) if isinstance(node, (ast.If, ast.IfExp)) else 0
    for name, value in ast.iter_fields(node):
        is_now = is_under or (name, of) in (("body", 1), ("orelse", -1))
        for each in value if isinstance(value, list) else [value]:
            if hasattr(each, "lineno"):
                found |= lines_of(each, is_now) - ({node.lineno} if isinstance(node, ast.IfExp) else set())
                leaves = isinstance(each, ast.If) and isinstance(each.body[-1], (ast.Return, ast.Raise, ast.Continue))
                is_now = is_now or (leaves and sign(each.test) < 0)
    return found


root, left_out = Path((sys.argv[1:] or ["."])[0]), [*ANYWHERE, *sys.argv[2:]]
files = {str(path.relative_to(root)): path.read_text() for path in sorted(root.glob("lightning_hybrid/**/*.py"))}
rows, whole = {path: lines_of(ast.parse(text)) for path, text in files.items()}, set(files)
for _ in files:  # until none is imported by another that is not CUDA's alone
    imported: dict[str, list[bool]] = {}
    for path, text in files.items():
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if (found := IMPORTS.match(line.strip())) and "TYPE_CHECKING" not in lines[number - 2]:
                for name in [found[1], *(f"{found[1]}.{each.strip()}" for each in (found[2] or "").split(","))]:
                    imported.setdefault(name, []).append(path in whole or number in rows[path])
    whole = {path for path in files if all(imported.get(path[:-3].replace("/", "."), [False])) or path.endswith(ALONE)}
for path, text in files.items():
    texts = [each for each in ast.walk(ast.parse(text)) if isinstance(getattr(each, "value", None), ast.Constant)]
    words = {n for each in texts if isinstance(each, ast.Expr) for n in range(each.lineno, each.end_lineno + 1)}
    code = {n for n, line in enumerate(text.split("\n"), 1) if line.strip() and not line.strip().startswith("#")}
    rows[path] = (code - words) & (code if path in whole else rows[path])
kept = {path: len(lines) for path, lines in rows.items() if lines and not any(part in path for part in left_out)}
print(*(f"{number:5} {path}{' (whole)' * (path in whole)}" for path, number in kept.items()), sep="\n")
print(f"{sum(kept.values()):5} in all")
