"""Tensor parallelism within a node for the layers that a network lists in `node_slices`."""
