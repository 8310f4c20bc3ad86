"""API reference: every public name is documented on exactly one page, under its import path for users."""

import re
from importlib import import_module

import pytest

from tests.checkout import ROOT, tracked_in

API = ROOT / "docs" / "api"
PACKAGES = ("", ".optim", ".callbacks", ".data", ".contrastive", ".models", ".comm")
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)$", re.MULTILINE)


def documented_names() -> list[str]:
    """Return the names on all pages. A module that lists its members eagerly contributes all of them."""
    names = []
    for page in sorted(tracked_in(API, "*.md")):
        for kind, name in DIRECTIVE.findall(page.read_text()):
            if kind != "module":
                names.append(name)
                continue
            # Sphinx documents only members that exist before their first lazy access.
            module = import_module(name)
            for member in getattr(module, "__all__", ()):
                if member in vars(module):
                    names.append(f"{name}.{member}")
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_is_documented_once_under_the_name_that_users_import(package):
    names = documented_names()
    module = import_module(f"lightning_hybrid{package}")
    counts = {}
    for member in module.__all__:
        counts[member] = names.count(f"lightning_hybrid{package}.{member}")
    assert counts == dict.fromkeys(module.__all__, 1)


def test_the_index_leads_to_each_page():
    text = (API / "README.md").read_text()
    toctree = re.search(r"^```\{toctree\}\n:hidden:\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    pages = {page.stem for page in tracked_in(API, "*.md")} - {"README"}
    assert set(toctree.split()) == pages
    assert {page for page in pages if f"]({page}.md)" in text} == pages
