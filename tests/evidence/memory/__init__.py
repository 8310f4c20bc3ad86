"""Count of bytes per parameter: `python -m tests.evidence.memory`."""
