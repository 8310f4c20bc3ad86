"""Prediction of steps on clusters that one does not have, and the choice of a plan. No training step imports it."""

from lightning_hybrid.checks import moved

__getattr__ = moved(__name__, {"calibration": "recipes.planning.calibration"})
