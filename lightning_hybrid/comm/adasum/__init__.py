"""Adasum between nodes: its DDP hook, and the combination of the gradients of several nodes."""
