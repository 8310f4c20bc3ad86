"""Prediction of steps on clusters that one does not have, and the choice of a plan. No training step imports it."""

from lightning_hybrid.checks import moved

_ESTIMATES = ("compression", "failures", "memory", "pipeline_cost")
_PLACES = {name: f"recipes.planning.estimates.{name}" for name in _ESTIMATES}
__getattr__ = moved(__name__, _PLACES | {"calibration": "recipes.planning.calibration"})
