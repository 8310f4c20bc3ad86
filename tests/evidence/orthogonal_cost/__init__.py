"""Cost of `LARS(direction="orthogonal")`, alone and shared: `python -m tests.evidence.orthogonal_cost`."""
