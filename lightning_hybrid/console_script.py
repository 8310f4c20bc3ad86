"""The script `lightning-hybrid`, which an installation holds next to the package and not in it.

To import a module of the package imports torch, which takes seconds: too long for a help, or for what was misspelt.
"""

import runpy
from importlib.util import find_spec
from pathlib import Path


def run() -> None:
    """Run `__main__.py` of the package without importing the package."""
    spec = find_spec("lightning_hybrid")
    assert spec is not None
    assert spec.origin is not None
    runpy.run_path(str(Path(spec.origin).with_name("__main__.py")), run_name="__main__")
