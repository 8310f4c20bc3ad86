"""Times what a checkpoint costs a step: `python -m tests.evidence.checkpoint_cost`."""
