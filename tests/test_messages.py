"""Messages in the source of the package: they name Python arguments and never keys of a recipe."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.checkout import ROOT, tracked_files

MODULES = tracked_files("lightning_hybrid/*.py")

GROUPS = ("strategy", "callbacks")
"""Groups of which every dotted name is a key: conf leaves out some of their arguments."""

VALUE_OF_YAML = r"=(?:null|true|false)\b|\bnull\b"
REMOVED_PART = r"(?<!\S)`?~[a-z_]+\b"
CHOICE_OF_GROUP = r"\bcallbacks=[a-z_]+\b"


def keys_of_files() -> set[str]:
    """Return the dotted keys with two words, `group.argument`, in the files of `conf`."""
    keys = set()
    for path in tracked_files("conf/*.yaml"):
        if path.parent.parent != ROOT / "conf":
            continue
        content = yaml.safe_load(path.read_text()) or {}
        keys |= {
            f"{path.parent.name}.{name}"
            for name in content
            if isinstance(name, str) and name != "defaults"
        }
    return keys


KEYS = {key for key in keys_of_files() if not re.search(r"[._]_target_|_partial_|@", key)}
KEY = re.compile(
    rf"(?<![\w./'\"])(?:{'|'.join(GROUPS)})[./]\w+"
    rf"|(?<![\w./'\"])(?:{'|'.join(sorted(map(re.escape, KEYS), key=len, reverse=True))})\b"
    rf"|{REMOVED_PART}|{CHOICE_OF_GROUP}|{VALUE_OF_YAML}"
)


def text_of(node: ast.AST) -> str | None:
    """Return the text of a literal, with `x` for each interpolated value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every literal that has several words and is not a docstring."""
    skipped = set()
    for node in ast.walk(tree):
        for statement in (
            getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []
        ):
            if isinstance(statement, ast.Expr):
                skipped.add(statement.value)
        if isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
        if node in skipped:
            text = None
        else:
            text = text_of(node)
        if text is not None and " " in text.strip():
            yield node.lineno, text


def keys_in(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {result[0]}"
        for line, text in messages(ast.parse(path.read_text()))
        for result in [KEY.search(text)]
        if result is not None
    ]


@pytest.mark.parametrize(
    "message", ["Set strategy.comm.algorithm=flat.", "with ~callbacks.replicas", "Set optim.lr=1"]
)
def test_a_message_with_a_key_of_a_recipe_is_found(tmp_path, message):
    source = f'def check():\n    """Set strategy.comm."""\n    raise ValueError(f"`x` (={{0}}) is wrong. {message}")\n'
    assert [bool(KEY.search(text)) for _, text in messages(ast.parse(source))] == [True]


@pytest.mark.parametrize(
    "message",
    ["Call `trainer.fit(module)`.", "Write comm=Comm(algorithm='flat').", "see self.strategy.x"],
)
def test_a_message_with_an_argument_or_an_attribute_of_python_is_none(message):
    assert KEY.search(message) is None


def test_no_message_of_the_package_names_a_key_of_a_recipe():
    """Users call the package from Python. `recipes.cli.key_note` adds the keys if a recipe raised the error."""
    # The console, and settings that `simulate` and `tune` propose, address users who type keys.
    skipped = {
        ROOT / "lightning_hybrid" / "__main__.py",
        *tracked_files("lightning_hybrid/planning/report/*.py"),
    }
    skipped.add(ROOT / "lightning_hybrid" / "planning" / "estimates" / "memory.py")
    results = [line for path in MODULES if path not in skipped for line in keys_in(path)]
    assert not results, "\n".join(results)
