"""Sharding of fp32 master weights and optimizer state over ranks (ZeRO stage 1)."""
