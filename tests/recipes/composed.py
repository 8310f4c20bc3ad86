"""Configurations, composed as the programs compose them."""

from typing import Any

from hydra import compose, initialize_config_dir

from recipes.cli import launch
from tests.checkout import ROOT


def composed(name: str, *overrides: str, **options: Any) -> Any:
    """Compose the configuration of `recipes/<name>.py` with these overrides."""
    launch.register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, overrides=list(overrides), **options)
