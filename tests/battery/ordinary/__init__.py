"""A battery of ordinary use: what trains under Lightning's `ddp` trains the same under `hybrid_allreduce`."""
