"""Sharing of the optimizer update: each rank keeps a part of master weights and optimizer state, and all weights."""
