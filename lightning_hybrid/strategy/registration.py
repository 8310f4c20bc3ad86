"""Registration of the strategy names with every Lightning package."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STRATEGY_NAME = "hybrid_allreduce"
PIPELINE_NAME = "hybrid_pipeline"
ELASTIC_NAME = "hybrid_elastic"

_DESCRIPTIONS = {
    STRATEGY_NAME: "Hybrid all-reduce data parallel",
    PIPELINE_NAME: "Pipeline parallel",
    ELASTIC_NAME: "Data parallel that continues after the loss of a host",
}

# For each module with a registry: the name of the registry in it, and the module of this package with the classes.
_REGISTRIES = {
    "lightning.pytorch.strategies": (
        "StrategyRegistry",
        "lightning_hybrid.flavours.lightning_pytorch",
    ),
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        "lightning_hybrid.flavours.pytorch_lightning",
    ),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_hybrid.flavours.fabric"),
    "lightning_fabric.strategies": (
        "STRATEGY_REGISTRY",
        "lightning_hybrid.flavours.lightning_fabric",
    ),
}

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
"""Suffixes of strategy names, with the start method of each."""


def register_everywhere() -> None:
    """Register the strategies in each Lightning package that is already imported or is imported later."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    sys.meta_path.insert(0, _RegisterWhenImported())


def register_names(registry: Any, strategy: Any, name: str = STRATEGY_NAME) -> None:
    """Register a strategy's name and its variants, such as `_spawn` and `_notebook`, in a registry.

    Args:
        registry: The registry of a Lightning package.
        strategy: The class of the strategy, or a function that creates a strategy.
        name: The name without suffixes.
    """
    for suffix, start_method in _START_METHODS.items():
        full_name = f"{name}{suffix}"
        if full_name in registry:
            continue
        description = f"{_DESCRIPTIONS[name]}, start_method={start_method}"
        registry.register(full_name, strategy, description=description, start_method=start_method)
        if name == ELASTIC_NAME:  # It does not support unused parameters.
            continue
        for unused in (False, True):
            registry.register(
                f"{full_name}_find_unused_parameters_{str(unused).lower()}",
                strategy,
                description=f"{description}, find_unused_parameters={unused}",
                find_unused_parameters=unused,
                start_method=start_method,
            )


def _register(module: ModuleType) -> None:
    """Register this package's strategies in the registry of one Lightning module."""
    attribute, flavour = _REGISTRIES[module.__name__]
    try:
        registry = getattr(module, attribute)
        # A function is registered, because Lightning is still being imported and the class needs more of Lightning.
        register_names(registry, partial(_strategy_of, flavour, "HybridAllReduceStrategy"))
        if "pytorch" in module.__name__:  # Fabric has no `training_step` that a schedule could run.
            pipeline = partial(_strategy_of, flavour, "HybridPipelineStrategy")
            register_names(registry, pipeline, PIPELINE_NAME)
            elastic = partial(_strategy_of, flavour, "HybridElasticStrategy")
            register_names(registry, elastic, ELASTIC_NAME)
        _suggest_names(registry)
    except Exception as error:
        # The version of Lightning may be unknown. Its import must not fail because of this package.
        warnings.warn(
            f"Could not register strategy={STRATEGY_NAME!r} in {module.__name__}: {error}",
            stacklevel=2,
        )


def _strategy_of(flavour: str, strategy: str, **options: Any) -> Any:
    return getattr(import_module(flavour), strategy)(**options)


def _suggest_names(registry: Any) -> None:
    """Make a strategy registry suggest this package's names if a name is misspelled.

    Lightning's error would list only its own names.
    """
    list_names = registry.available_strategies

    def available_strategies() -> list[str]:
        return _SuggestingNames(list_names())

    registry.available_strategies = available_strategies


class _SuggestingNames(list[str]):
    """List of strategy names that raises a helpful error if a misspelled name is looked up.

    It also raises an error for a strategy class that is passed in place of an object. Trainer and Fabric test whether
    the value of `strategy` is in the list, and offer no other hook before their own error.
    """

    def __contains__(self, strategy: object) -> bool:
        if super().__contains__(strategy):
            return True
        if isinstance(strategy, type) and strategy.__module__.startswith("lightning_hybrid."):
            raise TypeError(
                f"`strategy` (={strategy.__name__}) is a class, but must be an object or a name. Set "
                f"strategy={strategy.__name__}()."
            )
        if isinstance(strategy, str):
            suggestion = nearest_name(strategy, self)
            if suggestion is not None:
                raise ValueError(
                    f"`strategy` (={strategy!r}) is not a known name. Did you mean {suggestion!r}?"
                )
        return False


def nearest_name(misspelt: str, names: Collection[str]) -> str | None:
    """Return the strategy name of this package that is most similar to a misspelled name.

    The result is None if no name is similar, or if a name of Lightning is more similar.

    >>> names = ["ddp", "ddp_spawn", "hybrid_allreduce", "hybrid_allreduce_spawn", "hybrid_pipeline"]
    >>> [nearest_name(name, names) for name in ("hybrid", "hybrid-all-reduce", "hybrid_pipline", "ddp_spwan")]
    ['hybrid_allreduce', 'hybrid_allreduce', 'hybrid_pipeline', None]
    """
    spelling = misspelt.lower().replace("-", "_")
    if spelling.startswith("hybrid") and STRATEGY_NAME.startswith(spelling):
        return STRATEGY_NAME
    for name in difflib.get_close_matches(spelling, names, n=1):
        if name.startswith(tuple(_DESCRIPTIONS)):
            return name
    return None


class _RegisterWhenImported(MetaPathFinder):
    """Import finder that registers the strategies as soon as a Lightning package is imported.

    Other finders find the module.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _REGISTRIES:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader:
    """Module loader that executes a module with the wrapped loader, then registers the strategies.

    All other attributes are taken from the wrapped loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)
