"""Prediction of steps on clusters that one does not have, and the choice of a plan. No training step imports it."""
