"""Cost of a checkpoint to a step: `python -m tests.evidence.checkpoint_cost`."""
