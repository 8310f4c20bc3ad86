"""Runs killed at random points, compared after their resume: `python -m tests.evidence.resume`."""
