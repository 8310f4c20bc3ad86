"""Fault injection into short runs, with the resulting errors of every rank: `python -m tests.evidence.faults`."""
