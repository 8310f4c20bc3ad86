"""Image sets that fit in memory: loader and base of data modules."""

from lightning_hybrid.checks import moved

__getattr__ = moved(__name__, {name: f"recipes.datasets.{name}" for name in ("digits", "glyphs")})
