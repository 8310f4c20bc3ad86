"""Faults in short runs, and the errors of every rank: `python -m tests.evidence.faults`."""
