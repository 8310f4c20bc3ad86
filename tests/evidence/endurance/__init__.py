"""Search for growth over thousands of steps: `python -m tests.evidence.endurance`."""
