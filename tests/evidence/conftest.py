"""Collection rules of tests/recipes, applied to these tests."""

from tests.recipes.conftest import collect_ignore_glob  # noqa: F401
