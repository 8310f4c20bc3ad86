"""Callbacks of the recipes: reproducible random numbers, checkpoints and a progress bar."""
