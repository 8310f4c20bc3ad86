"""As in tests/recipes."""

from importlib.util import find_spec

from tests.recipes.conftest import collect_ignore_glob  # noqa: F401

collect_ignore = [] if find_spec("lightly") is not None else ["projects.py"]
