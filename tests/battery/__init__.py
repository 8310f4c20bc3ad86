"""Some 300 cases of user code, run under Lightning's `ddp` and under our strategy, and compared."""
