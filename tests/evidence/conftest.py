"""As in tests/recipes."""

from tests.recipes.conftest import collect_ignore_glob  # noqa: F401
