"""Callbacks of the recipes: exact repetition, checkpoints within an epoch, a progress bar."""
