"""Every public behaviour of Lightning's trainer, held against `ddp`: what differs is in the strategy's README."""
