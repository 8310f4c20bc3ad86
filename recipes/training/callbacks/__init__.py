"""Callbacks of the recipes, for reproducible random numbers, checkpoints and a progress bar."""
