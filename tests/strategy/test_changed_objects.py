"""Comparison of the documentation page on changed objects with the syntax trees of the package."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from tests.checkout import ROOT, tracked_files

PAGE = ROOT / "lightning_hybrid" / "strategy" / "changed_objects.md"

# Variables that hold objects of torch, Lightning or the user, whatever the names of their attributes.
FOREIGN = set(
    "average connector error exception installed layer loader local loop metric module net one "
    "optimizer parameter scheduler torch trainer".split()
)
IN_ANY_MODULE = {"__class__", "__dict__", "setattr", "delattr"}
"""Ways that do not say what is changed: the page names the module too."""


def attributes_of_our_classes(trees: Iterable[ast.AST]) -> set[str]:
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            names |= names_in_body(node)
        elif is_attribute_of_self(node) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names - IN_ANY_MODULE


def is_attribute_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and is_named(node.value, {"self"})


def names_in_body(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields and methods."""
    names = set()
    targets: list[ast.expr] = []
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign):
            targets.append(statement.target)
        elif isinstance(statement, ast.Assign):
            targets += statement.targets
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def is_named(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def changes(tree: ast.AST, our_attributes: set[str]) -> Iterator[str]:
    """Yield all changes of foreign objects in a module: attributes, entries of a `__dict__` and process state."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                if isinstance(root, ast.Call):
                    root = root.func
                else:
                    root = root.value
            is_ours = is_named(node.value, {"self", "cls", "ctx"}) and node.attr != "__class__"
            if not is_ours and (node.attr not in our_attributes or is_named(root, FOREIGN)):
                yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            text = ast.unparse(node.value)
            if text in ("os.environ", "sys.modules"):
                yield text
            elif text.endswith(".__dict__") or text.startswith("vars("):
                yield "__dict__"
        elif isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            if re.fullmatch(
                r"(os\.environ|sys\.(meta_path|path_hooks))\.(update|pop|setdefault|insert|append)",
                text,
            ):
                yield text.rpartition(".")[0]
            elif text in ("setattr", "delattr") and not is_named(node.args[0], {"self"}):
                yield text


@cache
def all_changes() -> set[str]:
    trees = {path: ast.parse(path.read_text()) for path in tracked_files("lightning_hybrid/*.py")}
    our_attributes = attributes_of_our_classes(trees.values())
    names = set()
    for path, tree in trees.items():
        for name in changes(tree, our_attributes):
            if name in IN_ANY_MODULE:
                name = f"{name} [{path.stem}]"
            names.add(name)
    return names


def test_every_change_of_a_foreign_object_is_on_the_page():
    named = set(re.findall(r"`([^`]+)`", PAGE.read_text()))
    assert not all_changes() - named


def test_the_page_names_no_change_that_was_removed():
    first_cells = re.findall(r"^\| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    named = set()
    for cell in first_cells:
        named |= {name for name in re.findall(r"`([^`]+)`", cell) if "[" in name}
    assert named, "the page has such rows"
    assert named <= all_changes()
