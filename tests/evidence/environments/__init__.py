"""Programs in bad environments, and what they report: `python -m tests.evidence.environments`."""
