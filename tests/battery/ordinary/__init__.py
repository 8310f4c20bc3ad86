"""Battery of ordinary user code: what trains under `ddp` trains the same under `hybrid_allreduce`."""
