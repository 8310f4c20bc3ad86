"""Checkpoint files that are whole or not there, written while training continues."""
