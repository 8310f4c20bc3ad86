"""Predicts steps on clusters that one does not have, and chooses a plan for them. No training step imports it."""
