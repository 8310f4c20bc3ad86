"""Counts bytes per parameter: `python -m tests.evidence.memory`."""
