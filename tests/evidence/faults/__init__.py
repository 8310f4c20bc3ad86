"""Injects faults into short runs and judges what every rank says: `python -m tests.evidence.faults`."""
