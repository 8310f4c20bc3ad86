"""Comparison of the page on changed objects with the package's syntax trees."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from tests.checkout import ROOT, tracked_files

PAGE = ROOT / "lightning_hybrid" / "strategy" / "changed_objects.md"

# Variables that hold objects of torch's, Lightning's or the user's, whatever their attributes are called.
FOREIGN = set(
    "connector error exception installed layer loader local loop metric module net one optimizer".split()
)
FOREIGN |= set("average parameter scheduler torch trainer".split())
IN_ANY_MODULE = {"__class__", "__dict__", "setattr", "delattr"}
"""Ways that say nothing of what is changed: the page names the module too."""


def own_attributes(trees: Iterable[ast.AST]) -> set[str]:
    result = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            fields += [
                target
                for each in node.body
                if isinstance(each, ast.Assign)
                for target in each.targets
            ]
            result |= {field.id for field in fields if isinstance(field, ast.Name)}
            result |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_named(node.value, {"self"})
        ):
            result.add(node.attr)
    return result - IN_ANY_MODULE


def is_named(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def changes(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Names of what a module changes in others: attributes, entries of a `__dict__`, state of the process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                if isinstance(root, ast.Call):
                    root = root.func
                else:
                    root = root.value
            is_own = is_named(node.value, {"self", "cls", "ctx"}) and node.attr != "__class__"
            if not is_own and (node.attr not in own or is_named(root, FOREIGN)):
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
    own = own_attributes(trees.values())
    return {
        f"{name} [{path.stem}]" if name in IN_ANY_MODULE else name
        for path, tree in trees.items()
        for name in changes(tree, own)
    }


def test_every_change_of_an_object_of_others_is_on_the_page():
    named = set(re.findall(r"`([^`]+)`", PAGE.read_text()))
    assert not all_changes() - named


def test_the_page_names_no_change_that_is_gone():
    first = re.findall(r"^\| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    named = {name for cell in first for name in re.findall(r"`([^`]+)`", cell) if "[" in name}
    assert named <= all_changes()
