"""Skips these tests if packages of the recipes' command line are missing."""

from importlib.util import find_spec


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if all(map(_is_there, ("hydra", "omegaconf", "wandb"))):
    collect_ignore_glob = []
else:
    collect_ignore_glob = ["*.py"]
