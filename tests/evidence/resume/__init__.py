"""Kills runs at random points and compares the resumed run: `python -m tests.evidence.resume`."""
