"""Adasum between nodes: what is done with a bucket, and the sum of two gradients that nodes share the work of."""
