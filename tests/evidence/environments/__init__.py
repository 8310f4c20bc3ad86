"""Starts programs in bad environments and reads what they say: `python -m tests.evidence.environments`."""
